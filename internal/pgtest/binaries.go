package pgtest

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

// DefaultVersion of Postgres, if neither Options nor the environment name one.
const DefaultVersion = "18.4"

// binaries is a version of Postgres on this machine, with what is kept beside
// it: a data folder fresh from initdb, of which each server gets a copy, and
// the password of its superuser. The folder belongs to one account:
//
//	lock           held while something below is being made
//	pg/            bin, lib, share; there only when complete
//	data/          fresh from initdb; there only when complete
//	password       of data/, readable by us only
//	server-*/      one for each server, with its lock
type binaries struct {
	folder   string
	bin      string // of the programs
	version  string
	password string
}

func (b *binaries) program(name string) string { return filepath.Join(b.bin, name) }

func findBinaries(o Options) (*binaries, error) {
	b := &binaries{bin: o.Bin, version: o.Version}
	if b.bin != "" {
		out, err := exec.Command(b.program("postgres"), "--version").CombinedOutput()
		words := strings.Fields(string(out)) // postgres (PostgreSQL) 15.18 (Debian …)
		if err != nil {
			return nil, fmt.Errorf("%s --version: %w: %s", b.program("postgres"), err, out)
		}
		if len(words) < 3 {
			return nil, fmt.Errorf("%s --version says %q", b.program("postgres"), out)
		}
		b.version = words[2]
	}
	if b.version == "" {
		b.version = os.Getenv("DEDUPD_TEST_POSTGRES_VERSION")
	}
	if b.version == "" {
		b.version = DefaultVersion
	}
	name := "dedupd-postgres-" + b.version
	if b.bin != "" {
		name += "-installed"
	}
	folder, err := cacheFolder(name + "-" + strconv.Itoa(os.Geteuid()))
	if err != nil {
		return nil, err
	}
	b.folder = folder
	if b.bin == "" {
		b.bin = filepath.Join(folder, "pg", "bin")
	}
	// Test binaries of several packages start at once: one of them fetches.
	lock, err := lockFile(filepath.Join(folder, "lock"), true)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	// Nobody else is at work here, so what lies half made was given up.
	for _, pattern := range []string{"fetch-*", "initdb-*"} {
		given, _ := filepath.Glob(filepath.Join(folder, pattern))
		for _, path := range given {
			_ = os.RemoveAll(path)
		}
	}
	if _, err := os.Stat(b.program("postgres")); err != nil {
		if err := b.fetch(b.version, o.Progress); err != nil {
			return nil, fmt.Errorf("fetch Postgres %s: %w", b.version, err)
		}
	}
	if _, err := os.Stat(filepath.Join(folder, "data")); err != nil {
		if err := b.initialise(b.version); err != nil {
			return nil, fmt.Errorf("initdb: %w", err)
		}
	}
	password, err := os.ReadFile(filepath.Join(folder, "password"))
	b.password = string(password)
	return b, err
}

// fetch downloads the binaries. The library can only fetch and start in one
// call, and its way of starting leaves servers behind: so it is given a data
// folder on which no server can start, and what counts is what it has unpacked.
func (b *binaries) fetch(version string, progress func(done, total int64) error) error {
	work, err := os.MkdirTemp(b.folder, "fetch-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(work) }()
	unpacked, barren := filepath.Join(work, "pg"), filepath.Join(work, "barren")
	major, _, _ := strings.Cut(version, ".")
	if err := os.Mkdir(barren, 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(barren, "PG_VERSION"), []byte(major), 0o600); err != nil {
		return err
	}
	// The library leaves its connection to the next request, and a test that looks
	// for leaks would find it.
	defer http.DefaultClient.CloseIdleConnections()
	if progress != nil {
		before := http.DefaultTransport
		http.DefaultTransport = meter{before, progress}
		defer func() { http.DefaultTransport = before }()
	}
	full := version
	if strings.Count(full, ".") == 1 {
		full += ".0"
	}
	defer removeLogs(time.Now())
	started := embeddedpostgres.NewDatabase(embeddedpostgres.DefaultConfig().
		Version(embeddedpostgres.PostgresVersion(full)).
		Port(0).
		CachePath(work).
		RuntimePath(unpacked).
		DataPath(barren).
		Logger(io.Discard)).Start()
	if _, err := os.Stat(filepath.Join(unpacked, "bin", "postgres")); err != nil {
		return started
	}
	if err := openToAll(unpacked); err != nil {
		return err
	}
	if out, err := exec.Command(filepath.Join(unpacked, "bin", "postgres"), "--version").CombinedOutput(); err != nil {
		return fmt.Errorf("it doesn't run on this machine: %w: %s", err, out)
	}
	return os.Rename(unpacked, filepath.Join(b.folder, "pg"))
}

// removeLogs removes the log that the library leaves in the temporary folder.
func removeLogs(since time.Time) {
	logs, _ := filepath.Glob(filepath.Join(os.TempDir(), "embedded_postgres_log*"))
	for _, path := range logs {
		if info, err := os.Stat(path); err == nil && !info.ModTime().Before(since.Truncate(time.Second)) {
			_ = os.Remove(path) // if it isn't ours, it stays
		}
	}
}

// meter counts the bytes of the answers that pass through a transport.
type meter struct {
	http.RoundTripper
	progress func(done, total int64) error
}

func (m meter) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := m.RoundTripper.RoundTrip(r)
	// The archive, not its checksum.
	if err == nil && answer.StatusCode == http.StatusOK && (answer.ContentLength < 0 || answer.ContentLength > 1<<20) {
		answer.Body = &meteredBody{answer.Body, m.progress, 0, answer.ContentLength}
	}
	return answer, err
}

type meteredBody struct {
	io.ReadCloser
	progress    func(done, total int64) error
	done, total int64
}

func (b *meteredBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.done += int64(n)
	if stop := b.progress(b.done, b.total); stop != nil {
		return n, stop
	}
	return n, err
}

// initialise makes the data folder of which every server gets a copy: copying
// it is several times faster than initdb.
func (b *binaries) initialise(version string) error {
	a := ownAccount()
	work, err := os.MkdirTemp(b.folder, "initdb-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(work) }()
	password := rand.Text()
	file, data := filepath.Join(work, "password"), filepath.Join(work, "data")
	if err := os.WriteFile(file, []byte(password), 0o600); err != nil {
		return err
	}
	if err := errors.Join(a.own(work), a.own(file)); err != nil {
		return err
	}
	args := []string{
		"-D", data, "-U", "postgres", "--pwfile=" + file, "-A", "scram-sha-256",
		"-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions",
	}
	if major, _, _ := strings.Cut(version, "."); len(major) == 2 && major >= "16" {
		// The password is as good as random gets; slow hashing would only make
		// each connection cost milliseconds.
		args = append(args, "-c", "scram_iterations=1")
	}
	log, err := os.Create(filepath.Join(work, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	p, err := startProcess(b.program("initdb"), args, log, a)
	if err != nil {
		return err
	}
	<-p.Done()
	if err := p.Err(); err != nil {
		text, _ := os.ReadFile(log.Name())
		return fmt.Errorf("%w: %s", err, text)
	}
	if err := os.WriteFile(filepath.Join(b.folder, "password"), []byte(password), 0o600); err != nil {
		return err
	}
	return os.Rename(data, filepath.Join(b.folder, "data"))
}

// newState makes a server's folder with a fresh data folder in it.
func (b *binaries) newState(parent string, a account) (string, *os.File, error) {
	folder, held, err := b.newFolder(parent, a)
	if err != nil {
		return "", nil, err
	}
	if err := copyFolder(filepath.Join(b.folder, "data"), filepath.Join(folder, "data"), a); err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(folder), held.Close())
	}
	return folder, held, nil
}

// newFolder makes a server's folder in the parent, or where all are, and removes
// those there whose process is gone. The returned lock is what tells that the
// folder is in use.
func (b *binaries) newFolder(parent string, a account) (string, *os.File, error) {
	lock, err := lockFile(filepath.Join(b.folder, "lock"), true)
	if err != nil {
		return "", nil, err
	}
	defer lock.Close()
	old, err := filepath.Glob(filepath.Join(b.folder, "server-*"))
	if err != nil {
		return "", nil, err
	}
	for _, folder := range old {
		if l, err := lockFile(filepath.Join(folder, "lock"), false); err == nil {
			// Errors don't matter: the next one tries again.
			_ = os.RemoveAll(folder)
			_ = l.Close()
		}
	}
	folder, err := os.MkdirTemp(cmp.Or(parent, b.folder), "server-")
	if err != nil {
		return "", nil, err
	}
	held, err := lockFile(filepath.Join(folder, "lock"), true)
	if err != nil {
		return "", nil, err
	}
	if err := a.own(folder); err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(folder), held.Close())
	}
	return folder, held, nil
}
