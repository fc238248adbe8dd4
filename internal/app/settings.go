package app

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/dedupd/dedupd/dedup"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/internal/policy"
)

// recorded are the settings that a scope records, as this configuration has them.
type recorded struct {
	what dedup.Setting
	// check is doctor's name for it.
	check, key string
	now        string
}

// recordedSettings leave out id.from unless ids are claimed: under another strategy no
// copy is known by its id.
func recordedSettings(cfg *config.Config) []recorded {
	all := []recorded{{dedup.Strategy, "strategy", "dedup.strategy", strategy(cfg)}}
	if cfg.Dedup.Strategy == policy.StrategyClaim {
		all = append(all, recorded{dedup.IDSource, "ids", "id.from", strings.Join(cfg.ID.From, " ")})
	}
	return all
}

// strategy is dedup.strategy as one text, with what tells producers and numbers apart.
func strategy(cfg *config.Config) string {
	if cfg.Dedup.Strategy != policy.StrategySequence {
		return string(cfg.Dedup.Strategy)
	}
	s := cfg.Dedup.Sequence
	return fmt.Sprintf("sequence of %s by %s", strings.Join(s.Producer, " "), s.Seq)
}

// effect is what a change of the setting does to messages from before.
func (r *recorded) effect(before string) string {
	if r.what == dedup.IDSource {
		return "a copy of a message that was applied before has another id and is applied again"
	}
	switch name, _, _ := strings.Cut(r.now, " "); policy.Strategy(name) {
	case policy.StrategyPosition:
		return "nothing recognises a copy any more, and each one that a producer sends is applied again"
	case policy.StrategySequence:
		return "producers' marks are empty, or where this strategy left them: numbers above them are taken, and copies of messages that were applied since are applied again"
	default:
		return "messages that were applied by strategy " + before + " have no claims, and a copy of one is applied again; dedupd claims import claims their ids"
	}
}

// warnOfChanges warns when what tells copies has changed. What can't be recorded now, the
// next start records: the worker runs all the same.
func warnOfChanges(ctx context.Context, cfg *config.Config, store *dedup.Store, log *slog.Logger) {
	for _, r := range recordedSettings(cfg) {
		was, changed, err := store.Record(ctx, r.what, r.now)
		switch {
		case err != nil:
			log.Warn("a change of "+r.key+" can't be detected", "error", err)
		case changed:
			log.Warn(r.key+" has changed: "+r.effect(was.Before), "before", was.Before, "now", was.Value)
		}
	}
}

// settings compares the configuration with what workers have recorded.
func (d *doctor) settings(ctx context.Context, store *dedup.Store) {
	for _, r := range recordedSettings(d.cfg) {
		was, err := store.Recorded(ctx, r.what)
		if err != nil {
			continue // grants says what is missing
		}
		cure := "keep " + r.key + " for as long as copies of earlier messages may come; or expect them twice"
		switch until := was.Since.Add(time.Duration(d.cfg.Retention.Window)); {
		case was.Value != "" && was.Value != r.now:
			d.warn(r.check, cure, "%s is %s, but workers of this scope have run with %s: with this configuration, %s", r.key, r.now, was.Value, r.effect(was.Value))
		case was.Before != "" && time.Now().Before(until):
			d.warn(r.check, cure, "%s was %s until %s: %s", r.key, was.Before, was.Since.UTC().Format(time.RFC3339), r.effect(was.Before))
		}
	}
}
