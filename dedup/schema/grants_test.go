package schema_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dedupd/dedupd/dedup/schema"
)

// docs/operations.md prints the grants as the command does, but for comments and line
// breaks.
func TestGrantsInTheManual(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), "The grants are\n\n```sql\n")
	printed, _, _ := strings.Cut(after, "```")
	comments := regexp.MustCompile(`(?m)^--.*\n`)
	statements := func(sql string) []string {
		return strings.SplitAfter(strings.Join(strings.Fields(comments.ReplaceAllString(sql, "")), " "), ";")
	}
	s := &schema.Schema{Name: "dedupd", Scope: "orders"}
	if diff := cmp.Diff(statements(s.GrantSQL("worker")), statements(printed)); diff != "" {
		t.Errorf("the command (-) and docs/operations.md (+):\n%s", diff)
	}
}
