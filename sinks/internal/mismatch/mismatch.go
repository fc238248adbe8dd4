// Package mismatch follows the policy for messages that expect another state than they find.
package mismatch

import (
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/sinks"
)

// Settle does with message i of a batch what the policy says. A sink joins the errors of all
// such messages of a batch, so that they are found at once. why names the key of the
// configuration that holds the policy.
func Settle(batch *sinks.Batch, i int, on policy.Mismatch, why error) error {
	switch on {
	case policy.MismatchIgnore:
		batch.Outcome(i, sinks.Rejected)
		return nil
	case policy.MismatchStop:
		return sinks.HoldAt(i, why)
	}
	return sinks.PermanentAt(i, why)
}
