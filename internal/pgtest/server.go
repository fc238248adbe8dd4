package pgtest

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/dedupd/dedupd/internal/child"
)

// Options of a server. The zero value is a server for tests.
type Options struct {
	// Version of Postgres, such as "18.4". Default: the environment's
	// DEDUPD_TEST_POSTGRES_VERSION, else DefaultVersion.
	Version string
	// Bin is the folder of an installed Postgres' programs, such as
	// /usr/lib/postgresql/15/bin, to use instead of a downloaded one. That is
	// compiled for its size, and takes a fifth longer for the same.
	Bin string
	// Fsync makes commits survive a crash of the machine, as in production. Off
	// by default: a test's data needs to survive only a crash of the server.
	Fsync bool
	// Folder is where the server's data and log are to be, which its account must
	// be able to reach; such as a disk that can be filled. Default: the temporary
	// folder.
	Folder string
	// Settings are further parameters of postgresql.conf; they win.
	Settings map[string]string
	// Progress is told of the download of the binaries, if there is one: bytes
	// so far, and in all (-1 if unknown). An error that it returns ends the
	// download, and StartServer with it. It is called from StartServer's
	// goroutine. Only for programs that do nothing else meanwhile: the process's
	// other users of http.DefaultTransport would be counted too.
	Progress func(done, total int64) error
}

// Server is a Postgres of our own on 127.0.0.1: a direct child of this process,
// which ends with it in whatever way it ends. Its methods may be called by
// several goroutines.
type Server struct {
	binaries *binaries
	settings map[string]string
	port     int
	folder   string   // of the data and the log; removed by Stop
	lock     *os.File // held as long as the folder is in use
	account  account

	mu      sync.Mutex
	process *child.Process // nil after Stop
	killed  bool           // it ended without tidying up
}

const (
	startTimeout = 60 * time.Second // crash recovery included
	stopTimeout  = 30 * time.Second
)

// Version of the server, such as "18.4".
func (s *Server) Version() string { return s.binaries.version }

// StartServer fetches the binaries if need be, makes an empty data folder and
// starts Postgres on it. As root, Postgres runs as uid 65534, since it refuses
// to be root.
func StartServer(o Options) (*Server, error) {
	bin, err := findBinaries(o)
	if err != nil {
		return nil, err
	}
	s := &Server{binaries: bin, account: ownAccount()}
	if s.folder, s.lock, err = bin.newState(o.Folder, s.account); err != nil {
		return nil, fmt.Errorf("make a data folder: %w", err)
	}
	// Another process may take the port before Postgres does: then try the next.
	for try := 0; ; try++ {
		s.port, err = freePort()
		if err == nil {
			s.settings = s.parameters(o)
			err = s.start()
		}
		if err == nil {
			return s, nil
		}
		if try == 4 || !strings.Contains(err.Error(), "Address already in use") {
			return nil, errors.Join(err, s.remove())
		}
	}
}

// parameters are those of postgresql.conf.
func (s *Server) parameters(o Options) map[string]string {
	settings := map[string]string{
		"listen_addresses":        "127.0.0.1",
		"port":                    strconv.Itoa(s.port),
		"unix_socket_directories": "",
		"max_connections":         "200",
		"max_wal_size":            "2GB",
		"log_min_messages":        "warning",
		"fsync":                   "on",
	}
	if !o.Fsync {
		settings["fsync"] = "off"
		settings["full_page_writes"] = "off"
	}
	maps.Copy(settings, o.Settings)
	return settings
}

func (s *Server) arguments() []string {
	args := []string{"-D", s.dataFolder()}
	for _, name := range slices.Sorted(maps.Keys(s.settings)) {
		args = append(args, "-c", name+"="+s.settings[name])
	}
	return args
}

func (s *Server) dataFolder() string { return filepath.Join(s.folder, "data") }

// LogFile is where the server writes its log.
func (s *Server) LogFile() string { return filepath.Join(s.folder, "log") }

// URL of a database on this server, for its superuser. It stays the same over
// Kill and Restart.
func (s *Server) URL(db string) string {
	return fmt.Sprintf("postgres://postgres:%s@127.0.0.1:%d/%s?sslmode=disable", s.binaries.password, s.port, db)
}

// Pid of the postmaster; 0 while the server isn't running.
func (s *Server) Pid() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil || s.process.Ended() {
		return 0
	}
	return s.process.Pid()
}

// Stop ends the server and removes its data. It may be called twice.
func (s *Server) Stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return nil
	}
	// Nobody will read the data again, so there is no point in a checkpoint.
	err := s.end(syscall.SIGQUIT)
	s.process = nil
	return errors.Join(err, s.remove())
}

// Kill ends the server as a crash does: the postmaster and all its backends are
// gone at once by SIGKILL, in the middle of whatever they did. What the
// operating system has of their writes stays.
func (s *Server) Kill() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return errors.New("kill postgres: it has been stopped")
	}
	if s.process.Ended() {
		return nil
	}
	s.killed = true
	return killTree(s.process)
}

// Restart starts the server again on its data and its port: after Kill with
// crash recovery, else after an orderly shutdown that throws clients out.
func (s *Server) Restart() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return errors.New("restart postgres: it has been stopped")
	}
	if err := s.end(syscall.SIGINT); err != nil {
		return err
	}
	deadline := time.Now().Add(startTimeout)
	for {
		err := s.start()
		// Backends of a killed postmaster may take a moment to be gone.
		if err == nil || time.Now().After(deadline) || !strings.Contains(err.Error(), "still in use") {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (s *Server) end(signal syscall.Signal) error {
	if s.process.Ended() {
		return nil
	}
	s.process.Signal(signal)
	if s.process.Wait(stopTimeout) {
		return nil
	}
	s.killed = true
	if err := killTree(s.process); err != nil {
		return fmt.Errorf("postgres didn't stop within %s, and: %w", stopTimeout, err)
	}
	return nil
}

// start runs the server on its folder and waits until it takes connections.
func (s *Server) start() error {
	log, err := os.OpenFile(s.LogFile(), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	pidFile := filepath.Join(s.dataFolder(), "postmaster.pid")
	p, err := startProcess(s.binaries.program("postgres"), s.arguments(), log, s.account)
	if err != nil {
		return fmt.Errorf("start postgres: %w", err)
	}
	deadline := time.Now().Add(startTimeout)
	for !isReady(pidFile, p.Pid()) {
		if p.Ended() || time.Now().After(deadline) {
			if !p.Ended() {
				_ = killTree(p)
			}
			text, _ := os.ReadFile(s.LogFile())
			return fmt.Errorf("start postgres: not ready (%w); its log:\n%s", p.Err(), text)
		}
		time.Sleep(5 * time.Millisecond)
	}
	s.process = p
	s.killed = false
	return nil
}

// isReady reads what the postmaster says of itself: line 1 is its pid, which
// tells the file from one that a crash left behind, line 8 its status.
func isReady(pidFile string, pid int) bool {
	text, err := os.ReadFile(pidFile)
	if err != nil {
		return false
	}
	lines := strings.Split(string(text), "\n")
	return len(lines) >= 8 && lines[0] == strconv.Itoa(pid) && strings.TrimSpace(lines[7]) == "ready"
}

func (s *Server) remove() error {
	if s.killed {
		removeSharedMemory(filepath.Join(s.dataFolder(), "postmaster.pid"))
	}
	err := os.RemoveAll(s.folder)
	return errors.Join(err, s.lock.Close())
}

// freePort looks for a port below those that the kernel gives to outgoing
// connections, so that the server still finds it free when it starts again.
func freePort() (int, error) {
	var last error
	for range 100 {
		port := 20000 + rand.IntN(12000)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			return port, l.Close()
		}
		last = err
	}
	return 0, fmt.Errorf("find a free port: %w", last)
}
