package main

import (
	"fmt"
	"net/url"
	"time"

	"github.com/dedupd/dedupd/internal/pgrelay"
)

// replicate gives the primary a replica, behind a line that can be cut.
func (r *run) replicate() (err error) {
	u, err := url.Parse(r.url())
	if err != nil {
		return err
	}
	if r.link, err = pgrelay.Listen(u.Host); err != nil {
		return err
	}
	r.replica, err = r.server.Standby(r.ctx, r.link.Addr(), nil)
	return err
}

// failOver lets the primary die with commits that its replica has not received,
// and puts the replica in its place. Workers find it at the same address.
func (r *run) failOver() error {
	if err := r.await("the replica follows", time.Minute, func() error {
		var lag int64
		err := r.pool.Load().QueryRow(r.ctx, `SELECT coalesce(min(pg_current_wal_lsn() - replay_lsn), 1 << 30)::bigint FROM pg_stat_replication`).Scan(&lag)
		if err == nil && lag > 1<<20 {
			err = fmt.Errorf("it is %d bytes behind", lag)
		}
		return err
	}); err != nil {
		return err
	}
	r.sleep(500*time.Millisecond, 1500*time.Millisecond)
	r.link.Down()
	r.note("the replica is cut off")
	r.sleep(2*time.Second, 5*time.Second)
	before, err := r.positions(r.ctx)
	if err != nil {
		return err
	}
	r.write(event{What: "the primary dies, the replica takes its place", Failover: true})
	for _, w := range r.workers {
		w.relay.Down()
	}
	if err := r.server.Kill(); err != nil {
		return err
	}
	if err := r.replica.Promote(r.ctx); err != nil {
		return err
	}
	dead := r.server
	r.server, r.replica = r.replica, nil
	r.link.Close()
	if err := dead.Stop(); err != nil {
		return err
	}
	if err := r.connect(); err != nil {
		return err
	}
	after, err := r.positions(r.ctx)
	if err != nil {
		return err
	}
	for lane, at := range before {
		if after[lane] < at {
			r.count("lanes that went back")
		}
	}
	u, err := url.Parse(r.url())
	if err != nil {
		return err
	}
	for _, w := range r.workers {
		w.relay.Redirect(u.Host)
		w.relay.Up()
	}
	r.note("the replica is the primary")
	return r.replicate()
}
