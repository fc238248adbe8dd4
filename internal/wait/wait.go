// Package wait waits for a time, unless a context ends.
package wait

import (
	"context"
	"time"
)

// For waits for d. False: ctx ended before.
func For(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
