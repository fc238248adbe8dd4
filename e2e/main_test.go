package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dedupd/dedupd/internal/kafkatest"
	"github.com/dedupd/dedupd/internal/pgtest"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if left := stopAll(); len(left) > 0 && code == 0 {
		fmt.Fprintln(os.Stderr, "e2e: tests have left workers running:", left)
		code = 1
	}
	kafkatest.Stop()
	for _, b := range bouncers.all {
		_ = b.Stop()
	}
	if postgres.server != nil {
		if err := postgres.server.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, "e2e:", err)
		}
	}
	if binaries.folder != "" {
		_ = os.RemoveAll(binaries.folder)
	}
	os.Exit(code)
}

// needServices is the one way to skip: whoever asks for these tests without
// having the servers gets a failure that tells how to get them.
func needServices(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs the binary against real servers, and -short asks for tests without services")
	}
}

// binaries are the commands that tests run, by their folder in this repository.
var binaries struct {
	sync.Mutex
	folder string
	built  map[string]builtBinary
}

type builtBinary struct {
	path string
	err  error
}

// dedupd is the binary, built from this checkout by the first test that asks.
func dedupd(t *testing.T) string { return build(t, "./cmd/dedupd") }

// build builds a command, once.
func build(t *testing.T, command string) string {
	t.Helper()
	binaries.Lock()
	defer binaries.Unlock()
	b, ok := binaries.built[command]
	if !ok {
		b = goBuild(command)
		if binaries.built == nil {
			binaries.built = map[string]builtBinary{}
		}
		binaries.built[command] = b
	}
	if b.err != nil {
		t.Fatalf("build %s: %v", command, b.err)
	}
	return b.path
}

func goBuild(command string) (b builtBinary) {
	if binaries.folder == "" {
		if binaries.folder, b.err = os.MkdirTemp("", "dedupd-e2e-"); b.err != nil {
			return b
		}
	}
	b.path = filepath.Join(binaries.folder, filepath.Base(command))
	args := []string{"build", "-o", b.path}
	if os.Getenv("DEDUPD_TEST_RACE") != "" {
		args = append(args, "-race")
	}
	out, err := goTool(context.Background(), append(args, command)...)
	if err != nil {
		b.err = fmt.Errorf("%w\n%s", err, out)
	}
	return b
}

// goTool runs the go command at the root of the repository.
func goTool(ctx context.Context, args ...string) (stdout string, err error) {
	root, err := repository()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = root
	var errors strings.Builder
	cmd.Stderr = &errors
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, errors.String())
	}
	return string(out), err
}

// repository is the folder with go.mod.
func repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no go.mod above the working directory")
		}
		dir = parent
	}
}

// dice are a test's, by a seed that is printed.
func dice(t *testing.T) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("DEDUPD_TEST_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal("DEDUPD_TEST_SEED: ", err)
		}
		seed = n
	}
	t.Logf("DEDUPD_TEST_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// await asks until there is no complaint any more.
func await(t *testing.T, what string, within time.Duration, complaint func() error) time.Duration {
	t.Helper()
	began := time.Now()
	for {
		err := complaint()
		took := time.Since(began)
		if err == nil {
			return took
		}
		if took > within {
			t.Fatalf("%s: not within %s: %v", what, within, err)
		}
		time.Sleep(25 * time.Millisecond)
	}
}

// postgres is the server that all tests share which don't hurt theirs.
var postgres struct {
	sync.Mutex
	server    *pgtest.Server
	err       error
	databases int
}
