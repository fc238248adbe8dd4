package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dedupd/dedupd/internal/child"
)

// Bouncer is a PgBouncer in transaction mode in front of a server.
type Bouncer struct {
	server  *Server
	port    int
	folder  string
	process *child.Process
}

// BouncerAdvice is how to get the program that StartBouncer runs.
const BouncerAdvice = "it comes with the distribution: apt-get install pgbouncer"

// StartBouncer starts the PgBouncer of this machine in front of all databases of
// a server, with so many connections to each. Address leads to another way to the
// server, such as a relay; empty: straight. It ends with this process, or by Stop.
func StartBouncer(server *Server, address string, connections int) (_ *Bouncer, err error) {
	program, err := exec.LookPath("pgbouncer")
	if err != nil {
		program = "/usr/sbin/pgbouncer" // not in an ordinary user's path
		if _, err := os.Stat(program); err != nil {
			return nil, fmt.Errorf("there is no pgbouncer here; %s", BouncerAdvice)
		}
	}
	b := &Bouncer{server: server}
	if b.port, err = freePort(); err != nil {
		return nil, err
	}
	if b.folder, err = os.MkdirTemp("", "dedupd-pgbouncer-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = os.RemoveAll(b.folder)
		}
	}()
	host, port := "127.0.0.1", strconv.Itoa(server.port)
	if address != "" {
		u := url.URL{Host: address}
		host, port = u.Hostname(), u.Port()
	}
	settings := fmt.Sprintf(`[databases]
* = host=%s port=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = plain
auth_file = %s
admin_users = postgres
pool_mode = transaction
default_pool_size = %d
max_client_conn = 500
`, host, port, b.port, filepath.Join(b.folder, "users"), connections)
	users := fmt.Sprintf("%q %q\n", "postgres", server.binaries.password)
	err = errors.Join(server.account.own(b.folder),
		server.account.write(filepath.Join(b.folder, "users"), users),
		server.account.write(filepath.Join(b.folder, "pgbouncer.ini"), settings))
	if err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(b.folder, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	if b.process, err = startProcess(program, []string{"-q", filepath.Join(b.folder, "pgbouncer.ini")}, log, server.account); err != nil {
		return nil, fmt.Errorf("start pgbouncer: %w", err)
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		err := b.ping()
		if err == nil {
			return b, nil
		}
		if b.process.Ended() || time.Now().After(end) {
			b.process.Kill()
			text, _ := os.ReadFile(log.Name())
			return nil, fmt.Errorf("pgbouncer is not ready: %w; its log:\n%s", err, text)
		}
	}
}

func (b *Bouncer) ping() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	config, err := pgx.ParseConfig(b.URL("postgres"))
	if err != nil {
		return err
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	return errors.Join(conn.Ping(ctx), conn.Close(ctx))
}

// URL of a database through the pooler, for the server's superuser.
func (b *Bouncer) URL(db string) string {
	return fmt.Sprintf("postgres://postgres:%s@127.0.0.1:%d/%s?sslmode=disable", b.server.binaries.password, b.port, db)
}

// Stop ends it at once.
func (b *Bouncer) Stop() error {
	b.process.Kill()
	return os.RemoveAll(b.folder)
}
