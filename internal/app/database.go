package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/config"
)

// connectTimeout bounds one attempt to connect, unless the URL says otherwise.
const connectTimeout = 5 * time.Second

// OpenDatabase makes a configuration's pool and store. It doesn't connect, so its
// error is a *ConfigError. The caller closes the pool.
func OpenDatabase(ctx context.Context, cfg *config.Config, maxConnections int, logger *slog.Logger) (*pgxpool.Pool, *dedup.Store, error) {
	pc, err := poolConfig(cfg, logger)
	if err != nil {
		return nil, nil, &ConfigError{err}
	}
	pc.MaxConns = int32(maxConnections)
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return nil, nil, &ConfigError{fmt.Errorf("database: %w", err)}
	}
	store, err := dedup.NewStore(dedup.StoreConfig{
		Pool: pool, Schema: cfg.Database.Schema, Scope: cfg.Scope, Owner: owner(), Logger: logger,
		TransactionPooler: cfg.Database.Pooler != config.PoolerNone, FilterMemory: int64(cfg.Retention.FilterMemory),
	})
	if err != nil {
		pool.Close()
		return nil, nil, &ConfigError{err}
	}
	return pool, store, nil
}

// owner names this process in the lanes that it acquires.
func owner() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s/%d", host, os.Getpid())
}

func poolConfig(cfg *config.Config, logger *slog.Logger) (*pgxpool.Config, error) {
	address, err := cfg.Database.Connection()
	if err != nil {
		return nil, fmt.Errorf("database.url_file: %w", err)
	}
	pc, err := parseAddress(address, logger)
	if err != nil {
		return nil, fmt.Errorf("database.url: %w", err)
	}
	c := pc.ConnConfig
	if c.ConnectTimeout == 0 {
		c.ConnectTimeout = connectTimeout
	}
	if c.RuntimeParams["application_name"] == "" {
		c.RuntimeParams["application_name"] = "dedupd " + cfg.Scope
	}
	// The text of messages is UTF-8, whatever a role's or a database's settings say.
	c.RuntimeParams["client_encoding"] = "UTF8"
	if c.ValidateConnect == nil {
		// Replicas can't be written, and may show commits in another order.
		c.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
	}
	dedup.HearWarnings(c)
	if cfg.Database.Pooler != config.PoolerNone {
		// Each transaction may run on another connection: no prepared statements.
		c.DefaultQueryExecMode = pgx.QueryExecModeExec
	}
	pc.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
		address, err := cfg.Database.Connection()
		if err != nil {
			return err
		}
		now, err := parseAddress(address, slog.New(slog.DiscardHandler))
		if err != nil {
			return fmt.Errorf("database: %w", err)
		}
		renew(c, now.ConnConfig)
		return nil
	}
	return pc, nil
}

// renew updates what may change while we run: user, password, and the files of
// authorities and certificates. The servers stay the same: another database has
// other positions and needs another process.
func renew(c, now *pgx.ConnConfig) {
	c.User, c.Password = now.User, now.Password
	if c.Host == now.Host {
		c.TLSConfig = now.TLSConfig
	}
	for i, f := range c.Fallbacks {
		if i < len(now.Fallbacks) && f.Host == now.Fallbacks[i].Host {
			f.TLSConfig = now.Fallbacks[i].TLSConfig
		}
	}
}

// parseAddress reads a connection string. It demands a verified certificate where
// the string doesn't mention TLS and the server is another machine: the usual
// default, "prefer", talks to anybody.
func parseAddress(address string, logger *slog.Logger) (*pgxpool.Config, error) {
	pc, err := pgxpool.ParseConfig(address)
	if err != nil || isLocal(pc.ConnConfig) {
		return pc, err
	}
	if strings.Contains(address, "sslmode=") || os.Getenv("PGSSLMODE") != "" {
		if t := pc.ConnConfig.TLSConfig; t == nil || (t.InsecureSkipVerify && t.VerifyPeerCertificate == nil) {
			logger.Warn("the database's identity is not verified; use sslmode=verify-full", "host", pc.ConnConfig.Host)
		}
		return pc, nil
	}
	if strings.Contains(address, "://") {
		separator := "?"
		if strings.Contains(address, "?") {
			separator = "&"
		}
		return pgxpool.ParseConfig(address + separator + "sslmode=verify-full")
	}
	return pgxpool.ParseConfig(address + " sslmode=verify-full")
}

// isLocal reports whether all servers are reached by a socket or the loopback.
func isLocal(c *pgx.ConnConfig) bool {
	local := func(host string) bool {
		ip := net.ParseIP(host)
		return strings.HasPrefix(host, "/") || host == "localhost" || ip != nil && ip.IsLoopback()
	}
	for _, f := range c.Fallbacks {
		if !local(f.Host) {
			return false
		}
	}
	return local(c.Host)
}

// explainHangUp adds the likely reason that a server had no time to give. With TLS 1.3
// it refuses a client's certificate, or the lack of one, after the handshake, and may
// hang up before the client reads why.
func explainHangUp(err error) error {
	var failed *pgconn.ConnectError
	if errors.As(err, &failed) && failed.Config.TLSConfig != nil && (errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)) {
		return fmt.Errorf("%w (the server hung up after the TLS handshake: it may want a client's certificate, or another one: sslcert, sslkey)", err)
	}
	return err
}
