// Package sum is what mutate is tested on.
package sum

import "errors"

var errNegative = errors.New("negative")

// Positive adds up the numbers that are positive, up to the first zero.
func Positive(numbers []int) (sum int, err error) {
	for _, n := range numbers {
		if n < 0 {
			return 0, errNegative
		}
		if n == 0 {
			break
		}
		sum += n
	}
	return sum, nil
}

// Even reports whether a number is.
func Even(n int) bool { return n%2 == 0 }

// Next is the number that follows, if it is below a limit.
func Next(n, limit int) (int, bool) {
	if n+1 < limit {
		return n + 1, true
	}
	return 0, false
}

// Must panics.
func Must(err error) int {
	if err == nil {
		return 1
	}
	panic(err)
}
