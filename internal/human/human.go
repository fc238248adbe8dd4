// Package human formats numbers for people.
package human

import "fmt"

// Bytes formats a size in powers of 1024.
func Bytes(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	f, unit := float64(n)/1024, "KiB"
	for _, larger := range []string{"MiB", "GiB", "TiB"} {
		if f < 1023.95 { // or else it would be rounded to 1024.0
			break
		}
		f, unit = f/1024, larger
	}
	return fmt.Sprintf("%.1f %s", f, unit)
}
