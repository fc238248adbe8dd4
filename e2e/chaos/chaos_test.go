package main

import (
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestSlice is what every change must pass: each fault a few times, judged by the
// independent checker.
func TestSlice(t *testing.T) {
	if testing.Short() {
		t.Skip("runs the binary against real servers, and -short asks for tests without services")
	}
	seed := uint64(time.Now().UnixNano()) >> 20
	if s := os.Getenv("DEDUPD_TEST_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal("DEDUPD_TEST_SEED: ", err)
		}
		seed = n
	}
	t.Logf("DEDUPD_TEST_SEED=%d", seed)
	t.Chdir("../..") // programs are built from the repository
	g := &servers{folder: t.TempDir()}
	t.Cleanup(func() {
		if err := g.stop(); err != nil {
			t.Error(err)
		}
	})
	if err := g.start(t.Context()); err != nil {
		t.Fatal(err)
	}
	jobs := (&choice{seed: seed, short: true, brokers: []string{"kafka", "nats"}, pattern: regexp.MustCompile("")}).plan()
	done := 0
	err := g.doAll(t.Context(), jobs, 4, func(o outcome) error {
		done++
		t.Log(o.line())
		if o.Verdict != "valid" {
			t.Fail()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if done < 25 || done != len(jobs) {
		t.Errorf("%d of %d runs were done", done, len(jobs))
	}
}

// The rig judges nothing by the product's own code.
func TestSharesNoCode(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "github.com/dedupd/dedupd/e2e/chaos").Output()
	if err != nil {
		t.Fatal(err)
	}
	allowed := map[string]bool{"e2e/chaos": true, "e2e/rig": true, "e2e/shape": true, "internal/kafkatest": true, "internal/pgrelay": true, "internal/pgtest": true, "internal/child": true}
	for line := range strings.Lines(string(out)) {
		if ours, ok := strings.CutPrefix(strings.TrimSpace(line), "github.com/dedupd/dedupd/"); ok && !allowed[ours] {
			t.Errorf("the rig imports %s", ours)
		}
	}
}
