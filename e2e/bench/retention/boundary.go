package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
)

// boundary has the tests of package dedup rotate under load, many times, while
// concurrent duplicates arrive on both sides of each rotation: with the rotation lock, and with
// mutants that lack it.
func (b *bench) boundary(ctx context.Context) error {
	test := exec.CommandContext(ctx, "go", "test", "-count=1", "-timeout=30m", "-v", "-run=^(TestRotationsUnderLoad|TestRotationLoadFinds)", "./dedup")
	test.Env = append(os.Environ(), fmt.Sprint("DEDUPD_ROTATIONS=", max(150, b.scaled(2000))))
	out, err := test.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	b.report.Add("\n## Concurrent duplicates across rotations\n\nFour workers apply the same ids at the same time while generations rotate as fast as they can. The figures are the tests' own, of\n`DEDUPD_ROTATIONS=2000 go test -v -run 'TestRotationsUnderLoad|TestRotationLoadFinds' ./dedup`.\n\n")
	for _, m := range figure.FindAllStringSubmatch(string(out), -1) {
		b.report.Add("- %s\n", strings.TrimSpace(m[1]))
	}
	return nil
}

// figure is a line that a test logged.
var figure = regexp.MustCompile(`(?m)^\s+rotationload_test\.go:\d+: (.*)$`)
