package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/dedupd/dedupd/consumer"
	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/dedup/schema"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/policy"
	"github.com/dedupd/dedupd/internal/sqlstate"
	"github.com/dedupd/dedupd/sinks"
)

// The levels of a finding.
const (
	FindingOK      = "ok"
	FindingWarning = "warning" // a worker runs, but somebody should look
	FindingError   = "error"   // a worker doesn't start, or a lane stands still
)

// Finding is the result of one check.
type Finding struct {
	// Check names what was checked: database, schema, grants, ids, strategy, sink, source,
	// lane, window, expiry, clock, filters or dead letters.
	Check string `json:"check"`
	Level string `json:"level"`
	Text  string `json:"text"`
	// Cure is what to do about it; empty where all is well.
	Cure string `json:"cure,omitempty"`
}

// doctor collects findings about one scope.
type doctor struct {
	cfg      *config.Config
	findings []Finding
	reached  *schema.Server // nil: it wasn't
	// mayLose: a failover of the database may lose commits.
	mayLose bool
}

func (d *doctor) ok(check, format string, args ...any) {
	d.findings = append(d.findings, Finding{check, FindingOK, fmt.Sprintf(format, args...), ""})
}

func (d *doctor) warn(check, cure, format string, args ...any) {
	d.findings = append(d.findings, Finding{check, FindingWarning, fmt.Sprintf(format, args...), cure})
}

func (d *doctor) fail(check, cure, format string, args ...any) {
	d.findings = append(d.findings, Finding{check, FindingError, fmt.Sprintf(format, args...), cure})
}

// doctorTimeout bounds the checks of one server.
const doctorTimeout = 20 * time.Second

// Examine connects to everything that the configurations of a process's scopes name,
// changes nothing, and returns what it finds, each finding with its cure. Workers may run
// meanwhile. Only the configuration makes it fail: what is wrong with a server is a finding.
func Examine(ctx context.Context, scopes []*config.Config, registry *sinks.Registry) (findings []Finding, err error) {
	var all []*doctor
	for _, cfg := range scopes {
		d := &doctor{cfg: cfg}
		if err := d.examine(ctx, registry); err != nil {
			if len(scopes) > 1 {
				err = &PipelineError{cfg.Scope, err}
			}
			return nil, err
		}
		all = append(all, d)
		for _, f := range d.findings {
			if len(scopes) > 1 {
				f.Text, f.Cure = "scope "+cfg.Scope+": "+f.Text, strings.ReplaceAll(f.Cure, "-c FILE", "-c FILE --scope "+cfg.Scope)
			}
			findings = append(findings, f)
		}
	}
	return append(findings, connections(all)...), nil
}

// examine examines one scope.
func (d *doctor) examine(ctx context.Context, registry *sinks.Registry) error {
	cfg := d.cfg
	// The findings say what would be logged.
	quiet := slog.New(slog.DiscardHandler)
	sources, err := newSources(cfg)
	if err != nil {
		return &ConfigError{err}
	}
	pool, store, err := OpenDatabase(ctx, cfg, 2, quiet)
	if err != nil {
		return err
	}
	defer pool.Close()
	lanes, known := d.database(ctx, store, registry)
	var reached []consumer.Source
	for _, s := range sources {
		if d.source(ctx, s, lanes, known) {
			reached = append(reached, s)
		}
	}
	d.window(ctx, reached)
	return nil
}

// database checks everything in Postgres. known: lanes could be read.
func (d *doctor) database(ctx context.Context, store *dedup.Store, registry *sinks.Registry) (lanes []dedup.LaneState, known bool) {
	ctx, cancel := context.WithTimeout(ctx, doctorTimeout)
	defer cancel()
	server, err := store.Schema().Server(ctx)
	if err != nil {
		d.fail("database", connectCure(err), "%v", explainHangUp(err))
		return nil, false
	}
	d.reached = &server
	d.server(server)
	if !server.UTF8() {
		return nil, false // its content would have to move
	}
	d.mayLose = !server.SynchronousStandby
	if !d.schema(ctx, store, server.Role) || !d.grants(ctx, store, server.Role) {
		return nil, false
	}
	if _, err := OpenProcessor(ctx, d.cfg, registry, store); err != nil {
		d.fail("sink", sinkCure(err), "%s: %v", d.cfg.Sink.Kinds(), err)
	} else {
		d.ok("sink", "%s can be written to", d.cfg.Sink.Kinds())
	}
	lanes, err = store.LaneStates(ctx)
	if err != nil {
		d.fail("lane", "", "%v", err)
		return nil, false
	}
	d.expiry(ctx, store, lanes)
	d.deadLetters(ctx, store)
	return lanes, true
}

func (d *doctor) server(v schema.Server) {
	if v.Number < schema.OldestServer {
		d.fail("database", "upgrade it to 14 or newer", "Postgres %s is too old", v.Version)
		return
	}
	d.ok("database", "Postgres %s, as role %s", v.Version, v.Role)
	if !v.UTF8() {
		d.fail("database", schema.EncodingCure, "its encoding is %s, which would change the text of messages, or refuse it; dedupd needs UTF8", v.Encoding)
	}
	if !v.Fsync {
		d.warn("database", "set fsync = on, which is the default", "fsync is off: a crash of its machine loses what the brokers were told is durable, or the whole database")
	}
	if !v.FullPageWrites {
		d.warn("database", "set full_page_writes = on, which is the default, unless its file system writes pages whole", "full_page_writes is off: a crash of its machine may leave half-written pages")
	}
}

// connections compares what a server and its roles allow with what a worker wants there for
// all of its scopes: each has a pool of its own.
func connections(all []*doctor) []Finding {
	type role struct{ started, name string }
	byRole, direct := make(map[role]int), make(map[string]int)
	var sum doctor
	for _, d := range all {
		if v := d.reached; v != nil {
			byRole[role{v.Started, v.Role}] += d.cfg.Database.MaxConnections
			if d.cfg.Database.Pooler == config.PoolerNone {
				direct[v.Started] += d.cfg.Database.MaxConnections
			}
		}
	}
	for _, d := range all {
		v := d.reached
		if v == nil {
			continue
		}
		if need := byRole[role{v.Started, v.Role}]; v.RoleLimit >= 0 && v.RoleLimit < need {
			sum.fail("database", "raise the role's limit, or lower database.max_connections", "role %s may have %d connections, and one worker wants up to %d", v.Role, v.RoleLimit, need)
		}
		if need := direct[v.Started]; v.FreeConnections < need {
			sum.warn("database", "raise max_connections of the server, lower database.max_connections, or put a PgBouncer between",
				"the server has room for %d more connections, and one more worker wants up to %d", max(v.FreeConnections, 0), need)
		}
		delete(byRole, role{v.Started, v.Role}) // each is said once
		delete(direct, v.Started)
	}
	return sum.findings
}

func (d *doctor) schema(ctx context.Context, store *dedup.Store, role string) bool {
	err := store.Load(ctx)
	var wrong *schema.Error
	switch {
	case sqlstate.Of(err) == sqlstate.InsufficientPrivilege:
		return d.grants(ctx, store, role)
	case err == nil:
		d.ok("schema", "%s has the version of this dedupd, and scope %s", d.cfg.Database.Schema, d.cfg.Scope)
		d.settings(ctx, store)
		return true
	case !errors.As(err, &wrong):
		d.fail("schema", connectCure(err), "%v", err)
	case wrong.Have > wrong.Want:
		d.fail("schema", "run the newer dedupd that upgraded it", "%v", err)
	case d.cfg.Database.Migrate:
		d.warn("schema", "none: a worker creates it at its start, if its role owns the schema; or run dedupd migrate up -c FILE", "%v", err)
	default:
		d.fail("schema", "dedupd migrate up -c FILE, as the owner", "%v", err)
	}
	return false
}

func (d *doctor) grants(ctx context.Context, store *dedup.Store, role string) bool {
	missing, err := store.Schema().MissingRights(ctx)
	switch {
	case err != nil:
		d.fail("grants", connectCure(err), "%v", err)
	case len(missing) > 0:
		d.fail("grants", fmt.Sprintf("dedupd migrate up --grants %s -c FILE, as the schema's owner", role),
			"role %s lacks %s", role, strings.Join(missing, "; "))
	default:
		d.ok("grants", "role %s has what a worker needs on schema %s", role, d.cfg.Database.Schema)
		return true
	}
	return false
}

func (d *doctor) expiry(ctx context.Context, store *dedup.Store, lanes []dedup.LaneState) {
	status, err := store.Status(ctx)
	if err != nil {
		d.fail("expiry", "", "%v", err)
		return
	}
	filters := int64(0)
	for _, g := range status.Generations {
		filters += g.FilterBytes
		if g.Missing {
			d.fail("expiry", "restore it from a backup; or accept that its ids are forgotten: dedupd retention status says what to run", "the table of generation %d is gone, and its claims with it", g.Number)
		}
	}
	if limit := int64(d.cfg.Retention.FilterMemory); filters > limit {
		d.warn("filters", "raise retention.filter_memory, or shorten retention.window", "filters of sealed claims take %d MiB, and a worker may load %d: the rest is looked up in tables", filters>>20, limit>>20)
	}
	held := d.clocks(status, lanes)
	for _, l := range lanes {
		if l.ClockAhead || !l.HoldsUpExpiry || l.StreamAge == nil {
			continue
		}
		behind := time.Duration(*l.StreamAge * float64(time.Second)).Round(time.Second)
		if behind > time.Duration(d.cfg.Retention.Window)/2 {
			held = true
			d.warn("expiry", "if its topic is gone: dedupd lanes forget "+l.Source+" "+l.Lane+" -c FILE; else find out why it isn't read",
				"lane %s of source %s is %s behind: claims are kept until it moves on, for %s at most", l.Lane, l.Source, behind, d.cfg.Retention.MaxHold)
		}
	}
	if !held {
		d.ok("expiry", "no lane holds it up; %d generations of claims", len(status.Generations))
	}
}

// clocks reports wrong clocks. held: one of them holds up expiry.
func (d *doctor) clocks(status dedup.Status, lanes []dedup.LaneState) (held bool) {
	if by := time.Until(status.Now); by.Abs() > clockSlack {
		held = by > 0
		than, effect := "ahead of", ": a worker with this machine's clock expires no claims"
		if !held {
			than, effect = "behind", ""
		}
		d.warn("clock", "find out which of them is wrong, and set it right", "the database's clock is %s %s this machine's%s", by.Abs().Round(time.Second), than, effect)
	}
	for _, l := range lanes {
		if l.ClockAhead {
			held = true
			d.warn("clock", fmt.Sprintf("set the database's clock right; the lane's next batch then corrects its own. If none comes: dedupd lanes set-clock %s %s now --expire-earlier -c FILE", l.Source, l.Lane),
				"the clock of lane %s of source %s is at %s, ahead of the database's: nothing expires before retention.max_hold", l.Lane, l.Source, l.StreamTime.UTC().Format(time.RFC3339))
		}
	}
	for i := range status.Generations {
		g := &status.Generations[i]
		if !g.Ahead(status.Now) || g.State == "dropping" {
			continue
		}
		at, what := g.OpenedAt, "opened"
		if g.SealedAt != nil {
			at, what = g.SealedAt, "sealed"
		}
		d.warn("clock", fmt.Sprintf("set the database's clock right; then: dedupd retention set-clock %d now -c FILE", g.Number),
			"generation %d was %s at %s, ahead of the database's clock: its claims are kept that much longer", g.Number, what, at.UTC().Format(time.RFC3339))
	}
	return held
}

func (d *doctor) deadLetters(ctx context.Context, store *dedup.Store) {
	n, err := store.CountDeadLetters(ctx)
	switch {
	case err != nil:
		d.fail("dead letters", "", "%v", err)
	case n > 0:
		d.warn("dead letters", "dedupd dlq list -c FILE; then replay or discard them", "%d are kept", n)
	default:
		d.ok("dead letters", "none")
	}
}

// source compares a broker's lanes with those in the database. It returns whether
// the broker answered.
func (d *doctor) source(ctx context.Context, source consumer.Source, lanes []dedup.LaneState, known bool) bool {
	describer, ok := source.(consumer.Describer)
	if !ok {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, doctorTimeout)
	defer cancel()
	described, err := describer.Describe(ctx)
	if err != nil {
		d.fail("source", "check its address, its credentials and TLS, what it may read, and that the topic or stream is there", "%s: %v", source.Name(), err)
	} else {
		d.ok("source", "%s: %s", source.Name(), lanesText(described.Lanes))
	}
	if described.Paused != nil {
		d.warn("source", "resume it, or wait", "%s: nothing is read: %v", source.Name(), described.Paused)
	}
	if described.Consumed && d.mayLose {
		d.warn("source", "use a stream with limits retention, or Postgres with a synchronous standby; or dedupd run --accept-loss-on-failover",
			"%s: the stream deletes what is acknowledged, so what a failover of the database loses can't be read again; dedupd run refuses that without the flag", source.Name())
	}
	d.shared(source.Name(), described)
	if !known {
		return err == nil
	}
	before := len(d.findings)
	for _, l := range lanes {
		if l.Source == source.Name() {
			d.lane(l, described, err == nil)
		}
	}
	if len(d.findings) == before && err == nil {
		d.ok("lane", "%s: the database's positions are where the broker has messages", source.Name())
	}
	return err == nil
}

// shared reports another scope that reads by the same group or durable.
func (d *doctor) shared(source string, described consumer.Description) {
	for i := range d.cfg.Sources {
		s := &d.cfg.Sources[i]
		if s.Name != source {
			continue
		}
		seen := make(map[string]bool)
		for _, l := range described.Lanes {
			scope := dedup.OffsetMetadataScope(l.OffsetMetadata)
			if scope == "" || scope == d.cfg.Scope || seen[scope] {
				continue
			}
			seen[scope] = true
			if s.NATS != nil {
				d.fail("source", "give this scope a durable of its own; or delete the durable, if that scope no longer reads it",
					"%s: scope %s reads the same durable, so each of the two would get only a part of the messages", source, scope)
				continue
			}
			d.warn("source", "give each scope a group of its own; none needed if that scope no longer reads it",
				"%s: scope %s wrote the group's offset of %s: while both are in the group, each gets only a part of the messages, and begins where the other stopped", source, scope, l.Name)
		}
	}
}

func lanesText(lanes []consumer.BrokerLane) string {
	messages := int64(0)
	for _, l := range lanes {
		messages += l.End - l.First
	}
	return fmt.Sprintf("lanes: %d, positions at the broker: %d", len(lanes), messages)
}

// lane compares one lane. complete: the broker has described all of them.
func (d *doctor) lane(l dedup.LaneState, described consumer.Description, complete bool) {
	name := fmt.Sprintf("%s %s", l.Source, l.Lane)
	move := func(position int64) string {
		return fmt.Sprintf("dedupd lanes set-position %s %d -c FILE; docs/operations.md says what happens to which messages", name, position)
	}
	i := slices.IndexFunc(described.Lanes, func(b consumer.BrokerLane) bool { return b.Name == l.Lane })
	if i < 0 {
		if complete {
			d.warn("lane", fmt.Sprintf("if it is gone for good: dedupd lanes forget %s -c FILE", name), "%s: the broker has no such lane, and it holds up expiry", name)
		}
		return
	}
	b := described.Lanes[i]
	switch {
	case !l.Ordered && (l.CutAt != nil || l.NextPosition > b.End && (l.LogID == nil || b.LogID == "" || *l.LogID == b.LogID)):
		d.fail("lane", fmt.Sprintf("delete the durable, then: dedupd lanes forget --force %s -c FILE; docs/operations.md says what happens to which messages", name),
			"%s: the queue is at %d, but the stream lost its end and ends at %d: it is an older copy, or a disk is gone", name, l.NextPosition, b.End)
	case !l.Ordered && l.GapNext != nil:
		d.gap(l.Source, fmt.Sprintf("dedupd lanes set-position %s %d -c FILE", name, max(*l.GapNext, b.End)),
			fmt.Sprintf("%s: data is lost: the stream has discarded positions %d to %d, of which not all were read", name, *l.GapFrom, *l.GapNext-1))
	case !l.Ordered && b.Whole && l.NextPosition > 0 && l.NextPosition < b.First:
		d.gap(l.Source, fmt.Sprintf("dedupd lanes set-position %s %d -c FILE once a worker has found it", name, b.End),
			fmt.Sprintf("%s: data is lost: the queue is at %d, the stream has only %d and above", name, l.NextPosition, b.First))
	case !l.Ordered:
	case l.LogID != nil && b.LogID != "" && *l.LogID != b.LogID:
		d.fail("lane", move(0), "%s: it was created anew (its id is %s, the lane's was %s), so its positions mean other messages", name, b.LogID, *l.LogID)
	case l.CutAt != nil:
		d.fail("lane", move(*l.CutAt), "%s: the partition's log was cut at %d, below the lane's position %d: what is there now was never read", name, *l.CutAt, l.NextPosition)
	case l.NextPosition > b.End:
		d.fail("lane", move(b.End), "%s: the lane goes on at %d, but the partition ends at %d", name, l.NextPosition, b.End)
	case l.NextPosition < b.First:
		d.gap(l.Source, "dedupd lanes set-position", fmt.Sprintf("%s: data is lost: the lane goes on at %d, the broker has only %d and above", name, l.NextPosition, b.First))
	case b.Committed > l.NextPosition:
		d.warn("lane", "none: reading goes back to the database's position", "%s: the group is at %d and the database at %d, so the database must have lost commits", name, b.Committed, l.NextPosition)
	case l.BrokerPosition != nil && b.Committed >= 0 && b.Committed < *l.BrokerPosition:
		d.warn("lane", "none, if that is meant; on_group_reset says whether it is followed", "%s: the group was moved back to %d, from %d", name, b.Committed, *l.BrokerPosition)
	}
}

// gap reports messages that a broker no longer has. cure says how to go on this once.
func (d *doctor) gap(source, cure, text string) {
	for i := range d.cfg.Sources {
		s := &d.cfg.Sources[i]
		if s.Name == source && (s.Kafka != nil && s.Kafka.OnGap == policy.GapSkip || s.NATS != nil && s.NATS.OnGap == policy.GapSkip) {
			d.warn("lane", "none: on_gap is skip", "%s", text)
			return
		}
	}
	d.fail("lane", "accept it: on_gap: skip, or "+cure, "%s", text)
}

// window compares how long brokers keep messages with how long claims are kept.
func (d *doctor) window(ctx context.Context, sources []consumer.Source) {
	window := time.Duration(d.cfg.Retention.Window)
	failed := func(source string, err error) {
		d.warn("window", "allow it to describe the topic's configuration, or compare by hand", "%s: the broker doesn't say how long it keeps messages: %v", source, err)
	}
	for _, b := range brokerRetention(ctx, sources, failed) {
		const cure = "dedupd retention advise -c FILE says what a longer window costs"
		switch {
		case b.Keeps == 0:
			d.warn("window", cure, "%s is kept without a time limit: if the group is moved back, messages older than retention.window, %s, are applied again", b.Name, d.cfg.Retention.Window)
		case b.Keeps > window:
			d.warn("window", cure, "%s is kept for at least %s: if the group is moved back, messages older than retention.window, %s, are applied again", b.Name, b.Keeps, d.cfg.Retention.Window)
		default:
			d.ok("window", "claims are kept for %s, %s for %s", d.cfg.Retention.Window, b.Name, b.Keeps)
		}
	}
}

// sinkCure says what to do about a sink that can't be prepared.
func sinkCure(err error) string {
	return cmp.Or(dedup.PoolerHint(err), "create or grant what it names")
}

// connectCure says what to do about a database that can't be reached.
func connectCure(err error) string {
	var dns *net.DNSError
	var network *net.OpError
	if cure := dedup.PoolerHint(err); cure != "" {
		return cure
	}
	switch code := sqlstate.Of(err); {
	case sqlstate.Class(code) == "28":
		return "check the role, its password, the client's certificate if one is asked for (sslcert, sslkey), and pg_hba.conf"
	case sqlstate.Class(code) == "3D":
		return "create the database, or correct database.url"
	case code == sqlstate.InsufficientPrivilege:
		return "dedupd migrate up --grants ROLE -c FILE, as the schema's owner, gives the rights that are needed"
	case sqlstate.Class(code) == "53":
		return "raise max_connections of the server, or put a PgBouncer between"
	case errors.As(err, &dns):
		return "correct the host in database.url, or find out why its name isn't known here"
	case errors.As(err, &network):
		return "see whether the server runs and listens there, and whether a firewall or a NetworkPolicy is in the way"
	}
	return "check database.url, TLS (sslmode, sslrootcert) and the network"
}
