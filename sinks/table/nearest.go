package table

import "strings"

// nearest gives the name that somebody who wrote a wrong one most likely meant:
// the one with the fewest edits, at most a third of its letters. "" if there is none.
func nearest(wrong string, names []string) string {
	best, least := "", len(wrong)/3+1
	for _, name := range names {
		if n := edits(strings.ToLower(wrong), strings.ToLower(name)); n < least {
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
