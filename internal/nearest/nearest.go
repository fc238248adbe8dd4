// Package nearest guesses which name a wrong one was meant to be, for the "did you
// mean" of an error.
package nearest

import "strings"

// Name returns the name with the fewest edits from the wrong one, ignoring case. It
// allows a third of the wrong name's letters and one more: two swapped letters are two
// edits. It returns "" if no name is that near, or none has a letter in place.
func Name(wrong string, names []string) string {
	best, least := "", len(wrong)/3+2
	for _, name := range names {
		n := edits(strings.ToLower(wrong), strings.ToLower(name))
		if n < least && n < max(len(wrong), len(name)) {
			best, least = name, n
		}
	}
	return best
}

// edits is the Levenshtein distance in bytes.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
