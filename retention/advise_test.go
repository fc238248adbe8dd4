package retention_test

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/dedupd/dedupd/retention"
)

const (
	minute = time.Minute
	hour   = time.Hour
	older  = time.Duration(math.MaxInt64)
)

// ages are pairs of an upper bound and a number of duplicates.
func ages(pairs ...any) (all []retention.AgeBucket) {
	for i := 0; i < len(pairs); i += 2 {
		all = append(all, retention.AgeBucket{UpTo: pairs[i].(time.Duration), Duplicates: int64(pairs[i+1].(int))})
	}
	return all
}

// settled is a scope with the default settings, and with enough known of it.
func settled(ages []retention.AgeBucket) retention.AdviceInput {
	return retention.AdviceInput{
		Ages: ages, Observed: 30 * day, Horizon: 7*day + 6*hour,
		Window: 7 * day, Generation: 6 * hour, MaxHold: 28 * day, GenerationMaxClaims: 20_000_000, FilterMemory: 256 << 20,
		ClaimsPerSecond: 100, BytesPerClaim: 120,
	}
}

// adviceCase is a scope, what is different about it, and what is advised.
type adviceCase struct {
	name string
	in   retention.AdviceInput
	but  func(in *retention.AdviceInput)
	want time.Duration
	// says are parts of reasons and warnings, one each, that must be there;
	// silent are those that must not.
	says, silent []string
}

var adviceCases = []adviceCase{
	{
		name: "nothing was seen", in: settled(nil), want: 7 * day,
		says: []string{"Only 0 duplicates were counted", "How long the brokers keep messages was not looked at."}, silent: []string{"Twice"},
	},
	{
		name: "too few duplicates", in: settled(ages(minute, 98, 6*day, 1)), want: 7 * day,
		says: []string{"Only 99 duplicates were counted: fewer than 100 say little"}, silent: []string{"Twice", "last quarter"},
	},
	{
		name: "too short a time", in: settled(ages(minute, 1000)), want: 7 * day,
		but:  func(in *retention.AdviceInput) { in.Observed, in.Horizon = 20*day, 7*day },
		says: []string{"Ages were counted for 20d only.", "until 21d have been counted"}, silent: []string{"Twice"},
	},
	{
		name: "less than a week", in: settled(ages(minute, 1000)), want: hour,
		but: func(in *retention.AdviceInput) {
			in.Window, in.Generation, in.Observed, in.Horizon = hour, 10*minute, 6*day, 70*minute
		},
		says: []string{"until 7d have been counted"},
	},
	{
		name: "the window was just lengthened", in: settled(ages(minute, 900, hour, 100)), want: 7 * day,
		but:  func(in *retention.AdviceInput) { in.Horizon = 30 * hour },
		says: []string{"All 1000 duplicates came within 1h.", "But claims reach back 1d6h only, of a window of 7d: copies that came later could not be recognised so far"},
	},
	{
		name: "the window is just lengthened, and too short still", in: settled(ages(minute, 900, 6*day, 100)), want: 14 * day,
		but: func(in *retention.AdviceInput) { in.Horizon = 6 * day }, silent: []string{"claims reach back"},
	},
	{
		name: "a part of the time was asked for", in: settled(ages(minute, 1000)), want: 7 * day,
		but:    func(in *retention.AdviceInput) { in.Since, in.Observed = 2*day, day },
		says:   []string{"Only the last 2d were looked at, as --since asks.", "judged by less than 21d"},
		silent: []string{"Ages were counted", "Twice"},
	},
	{
		name: "a part of the time was asked for, and few came", in: settled(ages(minute, 10)), want: 7 * day,
		but:  func(in *retention.AdviceInput) { in.Since, in.Observed = 2*day, day },
		says: []string{"Only 10 duplicates were counted in the 2d that --since asks for: fewer than 100"},
	},
	{
		name: "more time was asked for than there is", in: settled(ages(minute, 1000)), want: 7 * day,
		but:  func(in *retention.AdviceInput) { in.Since, in.Observed = 30*day, 20*day },
		says: []string{"Ages were counted for 20d only."}, silent: []string{"--since"},
	},
	{
		name: "three windows are longer than ages are kept", in: settled(ages(minute, 1000)), want: hour,
		but: func(in *retention.AdviceInput) {
			in.Window, in.MaxHold, in.Horizon, in.Observed = 200*day, 400*day, 201*day, 366*day
		},
	},
	{
		name: "less than a year of a long window", in: settled(ages(minute, 1000)), want: 200 * day,
		but: func(in *retention.AdviceInput) {
			in.Window, in.MaxHold, in.Horizon, in.Observed = 200*day, 400*day, 201*day, 364*day
		},
		says: []string{"until 365d have been counted"},
	},
	{
		name: "a broker that could not be asked", in: settled(ages(minute, 1000)), want: hour,
		but:    func(in *retention.AdviceInput) { in.Asked, in.Unknown = true, []string{"kafka: dial\nrefused"} },
		says:   []string{"How long a broker keeps messages could not be found out: kafka: dial; refused. Whoever resets"},
		silent: []string{"not looked at"},
	},
	{
		name: "all came early", in: settled(ages(time.Second, 900, 6*hour, 100)), want: 12 * hour,
		says:   []string{"All 1000 duplicates came within 6h.", "is 12h: the shortest window compared that reaches it is 12h", "The oldest claim is 7d6h old."},
		silent: []string{"last quarter", "filter_memory", "max_hold", "retention.generation"},
	},
	{
		name: "between two candidates", in: settled(ages(minute, 1000, 2*day, 1)), want: 7 * day,
		says: []string{"is 4d: the shortest window compared that reaches it is 7d"},
	},
	{
		name: "the configured window is a candidate, too", in: settled(ages(minute, 1000, 2*day, 1)), want: 5 * day,
		but: func(in *retention.AdviceInput) { in.Window = 5 * day },
	},
	{
		name: "shorter than a generation", in: settled(ages(60*time.Second, 1000)), want: hour,
		says: []string{"Set retention.generation to 10m, a sixth of the window"},
	},
	{
		name: "many come just before their claims go", in: settled(ages(minute, 900, 7*day, 100)), want: 14 * day,
		says: []string{"10.0 % of the duplicates may have come in the last quarter of the time for which claims are kept (7d6h)", "probably not recognised"},
	},
	{
		name: "a short time is enough to see that", in: settled(ages(minute, 900, 7*day, 100)), want: 14 * day,
		but:  func(in *retention.AdviceInput) { in.Observed = 8 * day },
		says: []string{"last quarter"}, silent: []string{"counted for"},
	},
	{
		name: "one late copy is not many", in: settled(ages(minute, 999, 7*day, 1)), want: 14 * day,
		says: []string{"All 1000 duplicates came within 7d."}, silent: []string{"last quarter"},
	},
	{
		name: "nothing has expired yet", in: settled(ages(minute, 900, 2*day, 100)), want: 7 * day,
		but:    func(in *retention.AdviceInput) { in.Horizon, in.Observed = 2*day, 2*day },
		says:   []string{"Ages were counted for 2d only."},
		silent: []string{"last quarter"},
	},
	{
		name: "more was kept once", in: settled(ages(minute, 900, 7*day, 100)), want: 14 * day,
		but:  func(in *retention.AdviceInput) { in.Window, in.Generation, in.Horizon = day, hour, 25*hour },
		says: []string{"last quarter"},
	},
	{
		name: "longer than any candidate", in: settled(ages(minute, 999, 42*day, 1)), want: 84 * day,
		but: func(in *retention.AdviceInput) {
			in.Window, in.MaxHold, in.Horizon, in.Observed = 30*day, 60*day, 31*day, 90*day
		},
		says: []string{"the shortest window compared that reaches it is 84d", "Set retention.max_hold above the window, such as 336d"},
	},
	{
		name: "older than the ages that are counted", in: settled(ages(minute, 999, older, 1)), want: 203 * day,
		but: func(in *retention.AdviceInput) {
			in.Window, in.MaxHold, in.Horizon, in.Observed = 100*day, 400*day, 101*day, 400*day
		},
		says: []string{"1 of 1000 duplicates were older than the ages that are counted", "101d"}, silent: []string{"All 1000"},
	},
	{
		name: "a broker's retention that is covered stays covered", in: settled(ages(minute, 1000)), want: 3 * day,
		but: func(in *retention.AdviceInput) {
			in.Asked, in.Brokers = true, []retention.BrokerRetention{{Name: "kafka", Keeps: 3 * day}, {Name: "nats", Keeps: 2 * day}}
		},
		says: []string{"kafka keeps messages for 3d at least. Whoever resets a group to the earliest offset replays that much, and no less than 3d"}, silent: []string{"nats", "not looked at"},
	},
	{
		name: "a broker's retention that isn't covered", in: settled(ages(minute, 1000)), want: hour,
		but: func(in *retention.AdviceInput) {
			in.Window, in.Generation, in.Horizon = hour, 10*minute, 70*minute
			in.Asked, in.Brokers = true, []retention.BrokerRetention{{Name: "kafka", Keeps: 7 * day}}
		},
		says: []string{"what is older than the window of 1h is applied again. Only a window of 7d or longer prevents that. It would take 6.8 GiB on disk."},
	},
	{
		name: "a broker that keeps everything", in: settled(ages(minute, 1000)), want: hour,
		but: func(in *retention.AdviceInput) {
			in.Asked, in.Brokers = true, []retention.BrokerRetention{{Name: "kafka"}}
		},
		says: []string{"kafka keeps messages without limit."},
	},
	{
		name: "the window is kept, and a broker's retention is longer", in: settled(nil), want: 7 * day,
		but: func(in *retention.AdviceInput) {
			in.Asked, in.Brokers = true, []retention.BrokerRetention{{Name: "kafka", Keeps: 30 * day}}
		},
		says: []string{"Only a window of 30d or longer prevents that."},
	},
	{
		name: "filters need more memory", in: settled(ages(minute, 900, 7*day, 100)), want: 14 * day,
		but:  func(in *retention.AdviceInput) { in.ClaimsPerSecond = 1000 },
		says: []string{"The filters of 1229600000 claims take 2.6 GiB: set retention.filter_memory to 2752MiB"},
	},
	{
		name: "too many generations", in: settled(ages(minute, 900, 7*day, 100)), want: 14 * day,
		but:  func(in *retention.AdviceInput) { in.Generation = 15 * minute },
		says: []string{"Set retention.generation to 4h at least: a window may have no more than 1000 generations."},
	},
	{
		name: "no rate", in: settled(ages(minute, 1000)), want: hour,
		but:  func(in *retention.AdviceInput) { in.ClaimsPerSecond = 0 },
		says: []string{"there are no sizes"},
	},
}

func TestAdvice(t *testing.T) {
	for _, c := range adviceCases {
		t.Run(c.name, func(t *testing.T) {
			if c.but != nil {
				c.but(&c.in)
			}
			a := retention.Advise(c.in)
			if a.Window != c.want {
				t.Errorf("recommended %s, want %s", a.Window, c.want)
			}
			sentences := slices.Concat(a.Reasons, a.Warnings)
			for _, part := range c.says {
				if !slices.ContainsFunc(sentences, func(s string) bool { return strings.Contains(s, part) }) {
					t.Errorf("nothing says %q", part)
				}
			}
			for _, part := range c.silent {
				if slices.ContainsFunc(sentences, func(s string) bool { return strings.Contains(s, part) }) {
					t.Errorf("something says %q", part)
				}
			}
			if t.Failed() {
				t.Log(strings.Join(sentences, "\n"))
			}
		})
	}
}

func candidate(t interface{ Fatalf(string, ...any) }, a retention.Advice, window time.Duration) retention.Candidate {
	for _, c := range a.Candidates {
		if c.Window == window {
			return c
		}
	}
	t.Fatalf("there is no window of %s among those compared", window)
	return retention.Candidate{}
}

func TestWhatAWindowCatchesAndCosts(t *testing.T) {
	a := retention.Advise(settled(ages(time.Second, 50, 6*hour, 25, 3*day, 15, 4*day, 5, older, 5)))
	for _, want := range []retention.Candidate{
		// A window shorter than a generation has generations of a sixth.
		{Window: hour, Caught: 50, Share: 0.5, Claims: 420_000, DiskBytes: 50_400_000, FilterBytes: 966_000, Generations: 7},
		{Window: 6 * hour, Caught: 75, Share: 0.75, Claims: 4_320_000, DiskBytes: 518_400_000, FilterBytes: 9_936_000, Generations: 2},
		{Window: 2 * day, Caught: 75, Share: 0.75, Claims: 19_440_000, DiskBytes: 2_332_800_000, FilterBytes: 44_712_000, Generations: 9},
		{Window: 3 * day, Caught: 90, Share: 0.9, Claims: 28_080_000, DiskBytes: 3_369_600_000, FilterBytes: 64_584_000, Generations: 13},
		// What has no bound is caught by none for certain.
		{Window: 28 * day, Caught: 95, Share: 0.95, Claims: 244_080_000, DiskBytes: 29_289_600_000, FilterBytes: 561_384_000, Generations: 113},
	} {
		if got := candidate(t, a, want.Window); got != want {
			t.Errorf("got  %+v\nwant %+v", got, want)
		}
	}
	// At 10,000 a second a generation is full after 2,000 s.
	busy := settled(nil)
	busy.ClaimsPerSecond, busy.BytesPerClaim = 10_000, 0
	if got := candidate(t, retention.Advise(busy), 12*hour); got.Generations != 23 || got.Claims != 452_000_000 || got.DiskBytes != 100*got.Claims {
		t.Errorf("%+v", got)
	}
}

var bounds = []time.Duration{
	time.Second, 10 * time.Second, minute, 5 * minute, 15 * minute, 30 * minute, hour, 2 * hour, 4 * hour, 6 * hour, 12 * hour, day, 2 * day, 3 * day,
	4 * day, 5 * day, 6 * day, 7 * day, 10 * day, 14 * day, 21 * day, 28 * day, 42 * day, 60 * day, 90 * day, older,
}

// TestAdviceKeepsItsPromises has scopes of every kind.
func TestAdviceKeepsItsPromises(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := drawScope(t)
		a := retention.Advise(in)
		if len(a.Reasons) == 0 {
			t.Fatal("there is no reason")
		}
		checkCandidates(t, a)
		checkWindow(t, in, a)
		checkBrokers(t, in, a)
		recommended := candidate(t, a, a.Window)
		memory := slices.ContainsFunc(a.Warnings, func(s string) bool { return strings.Contains(s, "filter_memory") })
		if memory != (recommended.FilterBytes > in.FilterMemory) {
			t.Fatalf("filters of %d bytes in %d, told: %v", recommended.FilterBytes, in.FilterMemory, memory)
		}
	})
}

func drawScope(t *rapid.T) (in retention.AdviceInput) {
	duration := func(name string, from, to time.Duration) time.Duration {
		// Small numbers are drawn most often, and nothing is shortened below them.
		d := rapid.OneOf(rapid.Int64Range(int64(from), int64(to)), rapid.Map(rapid.IntRange(0, 400), func(days int) int64 { return int64(days) * int64(day) }))
		return min(max(time.Duration(d.Draw(t, name)), from), to)
	}
	in = retention.AdviceInput{
		Observed: duration("observed", 0, 400*day), Horizon: duration("horizon", 0, 400*day),
		Window: duration("window", minute, 200*day), MaxHold: duration("max_hold", minute, 400*day),
		GenerationMaxClaims: rapid.Int64Range(0, 1e9).Draw(t, "generation_max_claims"),
		FilterMemory:        rapid.Int64Range(0, 1<<40).Draw(t, "filter_memory"),
		ClaimsPerSecond:     rapid.Float64Range(0, 1e6).Draw(t, "claims_per_second"),
		BytesPerClaim:       rapid.Float64Range(0, 1000).Draw(t, "bytes_per_claim"),
	}
	in.Generation = duration("generation", time.Second, in.Window)
	for _, b := range bounds[:rapid.IntRange(1, len(bounds)).Draw(t, "buckets")] {
		if n := rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, 1e6)).Draw(t, "duplicates"); n > 0 {
			in.Ages = append(in.Ages, retention.AgeBucket{UpTo: b, Duplicates: n})
		}
	}
	for range rapid.IntRange(0, 2).Draw(t, "brokers") {
		in.Asked, in.Brokers = true, append(in.Brokers, retention.BrokerRetention{Name: "b", Keeps: duration("keeps", 0, 400*day)})
	}
	return in
}

func checkCandidates(t *rapid.T, a retention.Advice) {
	for i, c := range a.Candidates {
		if c.Caught > a.Duplicates || c.Share < 0 || c.Share > 1 || c.Claims < 0 || c.DiskBytes < 0 || c.FilterBytes < 0 || c.Generations < 2 {
			t.Fatalf("%+v", c)
		}
		if i == 0 {
			continue
		}
		before := a.Candidates[i-1]
		if c.Window <= before.Window || c.Caught < before.Caught || c.Share < before.Share || c.Claims < before.Claims {
			t.Fatalf("a longer window catches or keeps less: %+v, %+v", before, c)
		}
	}
}

// checkWindow wants a window that catches no less, and one that is shortened with good
// cause only.
func checkWindow(t *rapid.T, in retention.AdviceInput, a retention.Advice) {
	recommended, configured := candidate(t, a, a.Window), candidate(t, a, in.Window)
	if recommended.Caught < configured.Caught {
		t.Fatalf("the recommended %s catches %d, the configured %s %d", a.Window, recommended.Caught, in.Window, configured.Caught)
	}
	latest, unbounded := time.Duration(0), false
	for _, b := range in.Ages {
		if b.UpTo == older {
			unbounded = true
		} else {
			latest = b.UpTo
		}
	}
	if a.Window != in.Window {
		if a.Duplicates < 100 {
			t.Fatalf("%s on %d duplicates", a.Window, a.Duplicates)
		}
		if a.Window < 2*latest || !unbounded && recommended.Caught != a.Duplicates {
			t.Fatalf("%s, though a copy came after up to %s", a.Window, latest)
		}
	}
	if a.Window < in.Window {
		if in.Horizon < in.Window {
			t.Fatalf("shortened from %s to %s, though claims reach back %s only", in.Window, a.Window, in.Horizon)
		}
		if in.Observed < 7*day || in.Observed < min(3*in.Window, 365*day) {
			t.Fatalf("shortened from %s to %s after %s", in.Window, a.Window, in.Observed)
		}
		if unbounded {
			t.Fatalf("shortened from %s to %s, though nobody knows how old copies are", in.Window, a.Window)
		}
	}
}

func checkBrokers(t *rapid.T, in retention.AdviceInput, a retention.Advice) {
	for _, b := range in.Brokers {
		if b.Keeps > a.Window && b.Keeps <= in.Window {
			t.Fatalf("%s no longer covers the %s that a broker can replay", a.Window, b.Keeps)
		}
		told := slices.ContainsFunc(a.Warnings, func(s string) bool {
			return strings.Contains(s, "is applied again.") || strings.Contains(s, "applied again; no")
		})
		if (b.Keeps == 0 || b.Keeps > a.Window) && !told {
			t.Fatalf("nobody is told that a broker keeps messages for %s", b.Keeps)
		}
	}
}
