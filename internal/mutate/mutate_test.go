package main

import (
	"go/ast"
	"slices"
	"strings"
	"testing"
)

// The tests of testdata/sum are good for some changes and not for others; which,
// can be told by looking at them.
func TestMutate(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and runs a package's tests")
	}
	var out strings.Builder
	if err := mutate(t.Context(), "./testdata/sum", options{jobs: 2}, &out); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	last := lines[len(lines)-1]
	var missed []string
	for _, l := range lines[:len(lines)-1] {
		_, l, _ = strings.Cut(l, "sum.go:")
		missed = append(missed, l)
	}
	want := []string{
		"11: <= instead of <: n < 0", // there is no zero among the tests' numbers
		"15: left out: break (no test comes here)",
		"23: the other truth: return … n%2 == 0 (no test comes here)",
		"27: <= instead of <: n+1 < limit",
		"27: one more: n+1", "27: one less: n+1",
		"35: negated: err == nil (no test comes here)",
	}
	if !slices.Equal(missed, want) {
		t.Errorf("not noticed are\n%s\nwant\n%s", strings.Join(missed, "\n"), strings.Join(want, "\n"))
	}
	if !strings.HasSuffix(last, "7 not noticed") || !strings.Contains(last, "testdata/sum: ") {
		t.Errorf("the last line is %q", last)
	}
	// A package whose tests fail is nothing to measure.
	if err := mutate(t.Context(), "./testdata/sum", options{run: "Nothing", jobs: 2, only: []string{"none.go"}}, &out); err == nil {
		t.Error("nothing to change is no error")
	}
}

// What the compiler refuses is left out with its line, and the rest stays.
func TestWhatDoesNotCompileIsLeftOut(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a package's tests")
	}
	packages, err := load(t.Context(), "./testdata/sum")
	if err != nil || len(packages) != 1 {
		t.Fatalf("%d packages, %v", len(packages), err)
	}
	all, err := packages[0].mutants(nil)
	if err != nil {
		t.Fatal(err)
	}
	bad := all[0]
	bad.write = func(_ func(ast.Node) string, inner string) string { return "nobodyKnows__(" + inner + ")" }
	b, err := packages[0].build(t.Context(), t.TempDir(), all)
	if err != nil {
		t.Fatal(err)
	}
	if len(b.mutants) == 0 || slices.ContainsFunc(b.mutants, func(m *mutant) bool { return m.line == bad.line }) || len(b.mutants) >= len(all) {
		t.Errorf("%d of %d changes are left", len(b.mutants), len(all))
	}
}
