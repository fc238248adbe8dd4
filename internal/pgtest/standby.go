package pgtest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Standby makes a replica of the server, which follows it at the address: its
// own, or that of a relay in front of it. It is made with the server's programs
// alone. The replica is a server like any other, with the settings of the primary
// and these; it outlives the primary, and takes writes after Promote.
func (s *Server) Standby(ctx context.Context, address string, settings map[string]string) (_ *Server, err error) {
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	// The slot keeps the log that the copy needs, and what it misses later.
	slot := fmt.Sprint("standby_", time.Now().UnixNano())
	if _, err := conn.Exec(ctx, `SELECT pg_create_physical_replication_slot($1, true)`, slot); err != nil {
		return nil, fmt.Errorf("make a replication slot: %w", err)
	}
	start, stop := `SELECT pg_backup_start('standby', true)`, `SELECT labelfile FROM pg_backup_stop(false)`
	if s.major() < 15 {
		start, stop = `SELECT pg_start_backup('standby', true, false)`, `SELECT labelfile FROM pg_stop_backup(false, false)`
	}
	if _, err := conn.Exec(ctx, start); err != nil {
		return nil, fmt.Errorf("begin a backup: %w", err)
	}
	b := &Server{binaries: s.binaries, account: s.account}
	if b.folder, b.lock, err = s.binaries.newFolder("", s.account); err != nil {
		return nil, err
	}
	err = copyRunning(s.dataFolder(), b.dataFolder(), s.account)
	var label string
	if err == nil {
		err = conn.QueryRow(ctx, stop).Scan(&label)
	}
	if err == nil {
		err = s.account.write(filepath.Join(b.dataFolder(), "backup_label"), label)
	}
	if err == nil {
		err = s.account.write(filepath.Join(b.dataFolder(), "standby.signal"), "")
	}
	if err == nil {
		b.port, err = freePort()
	}
	if err == nil {
		host, port, _ := strings.Cut(address, ":")
		b.settings = maps.Clone(s.settings)
		maps.Copy(b.settings, map[string]string{
			"port":              strconv.Itoa(b.port),
			"primary_slot_name": slot,
			"primary_conninfo":  fmt.Sprintf("host=%s port=%s user=postgres password=%s sslmode=disable", host, port, s.binaries.password),
		})
		maps.Copy(b.settings, settings)
		err = b.start()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make a standby: %w", err), b.remove())
	}
	return b, nil
}

// Promote makes a replica a server of its own, and returns when it takes writes.
func (s *Server) Promote(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return err
	}
	var done bool
	err = conn.QueryRow(ctx, `SELECT pg_promote(true, 60)`).Scan(&done)
	if err == nil && !done {
		err = errors.New("the replica isn't promoted after 60 s")
	}
	return errors.Join(err, conn.Close(context.WithoutCancel(ctx)))
}

func (s *Server) major() int {
	n, _, _ := strings.Cut(s.Version(), ".")
	major, err := strconv.Atoi(n)
	if err != nil {
		return 0
	}
	return major
}

// copyRunning copies the data folder of a server that is at work. Files may come
// and go meanwhile; what is torn is in the log, which a backup's start begins.
func copyRunning(from, to string, a account) error {
	return filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		// The log comes by the replication; the others tell of the running server.
		switch top, _, inside := strings.Cut(rel, string(filepath.Separator)); {
		case rel == "postmaster.pid" || rel == "postmaster.opts":
			return nil
		case inside && (top == "pg_replslot" || top == "pg_stat_tmp" || top == "pg_wal" && !e.IsDir()):
			if e.IsDir() {
				return filepath.SkipDir
			}
			return nil
		}
		target := filepath.Join(to, rel)
		if e.IsDir() {
			err = os.Mkdir(target, 0o700)
		} else {
			err = copyFile(path, target)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		return a.own(target)
	})
}

// write makes a file that belongs to the account.
func (a account) write(path, text string) error {
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return err
	}
	return a.own(path)
}
