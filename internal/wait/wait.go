// Package wait pauses, unless a context ends.
package wait

import (
	"context"
	"time"
)

// For waits for d. It is false if ctx has ended before.
func For(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
