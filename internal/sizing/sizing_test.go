package sizing

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// cell reads a number of docs/benchmarks: of the row that begins with these words,
// by the title of its column.
func cell(t *testing.T, file, row, column string) float64 {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "benchmarks", file))
	if err != nil {
		t.Fatal(err)
	}
	var titles []string
	for l := range strings.Lines(string(text)) {
		if !strings.HasPrefix(l, "|") {
			titles = nil
			continue
		}
		cells := strings.Split(strings.Trim(strings.TrimSpace(l), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if titles == nil {
			titles = cells
			continue
		}
		if !strings.HasPrefix(strings.Join(cells, " / "), row) {
			continue
		}
		for i, name := range titles {
			if name != column || i >= len(cells) {
				continue
			}
			n, err := strconv.ParseFloat(strings.Fields(cells[i])[0], 64)
			if err != nil {
				t.Fatalf("%s: %s, %s: %v", file, row, column, err)
			}
			return n
		}
	}
	t.Fatalf("%s has no row %q with a column %q", file, row, column)
	return 0
}

// TestFiguresAreThoseMeasured compares the constants with the published tables.
// Benchmarks are repeated: if a figure differs by more than noise, find out why and
// update the constant.
func TestFiguresAreThoseMeasured(t *testing.T) {
	const worker, postgres, wal = "CPU a message: worker", "Postgres", "WAL a message"
	for _, c := range []struct {
		file, row, column string
		figure            float64
	}{
		{"throughput.md", "dedupd / ", worker, workerMicros},
		{"throughput.md", "dedupd / ", postgres, postgresMicros},
		{"throughput.md", "values of 1 KiB / ", worker, workerMicros1KiB},
		{"throughput.md", "values of 1 KiB / ", postgres, postgresMicros1KiB},
		{"throughput.md", "values of 8 KiB / ", worker, workerMicros8KiB},
		{"throughput.md", "values of 8 KiB / ", postgres, postgresMicros8KiB},
		{"throughput.md", "UUIDv7 / ", postgres, postgresMicrosOrdered},
		{"throughput.md", "NATS, a queue / ", worker, workerMicrosNATS},
		{"throughput.md", "NATS, a queue / ", postgres, postgresMicrosNATS},
		{"throughput.md", "3 typed columns / ", worker, workerMicros3Columns},
		{"throughput.md", "3 typed columns / ", postgres, postgresMicros3Columns},
		{"throughput.md", "12 typed columns / ", worker, workerMicros12Columns},
		{"throughput.md", "12 typed columns / ", postgres, postgresMicros12Columns},
		{"throughput.md", "0 % resent / ", wal, walBytes},
		{"growth.md", "no index on the sink's table / at 1.0 M", postgres, postgresMicrosFewClaims},
		{"growth.md", "no index on the sink's table / at 5.0 M", postgres, postgresMicrosManyClaims},
		{"growth.md", "no index on the sink's table / at 20.0 M", postgres, postgresMicrosNoIndex},
		{"growth.md", "a primary key on the sink's table / at 20.0 M", postgres, postgresMicrosIndex},
		{"growth.md", "no index on the sink's table / at 20.0 M", wal, walBytesNoIndex},
		{"growth.md", "a primary key on the sink's table / at 20.0 M", wal, walBytesIndex},
		{"retention.md", "2.", "bytes a claim", filterBytes},
	} {
		measured := cell(t, c.file, c.row, c.column)
		if off := math.Abs(measured/c.figure - 1); off > 0.2 {
			t.Errorf("%s, %s, %s: %v, and the figure here is %v", c.file, c.row, c.column, measured, c.figure)
		}
	}
}

func usual() Input {
	const day = 24 * time.Hour
	return Input{
		Rate: 5000, Duplicates: 0.2, MessageBytes: 200, ID: IDUUID, Broker: BrokerKafka, Window: 7 * day, Generation: 6 * time.Hour, GenerationMaxClaims: 20_000_000,
		FilterMemory: 256 << 20, MaxHold: 28 * day, InflightBytes: 128 << 20, MaxConnections: 4, Checkpoint: 5 * time.Minute,
	}
}

// near reports whether a number is within a twentieth of another.
func near(got, want float64) bool { return math.Abs(got-want) <= 0.05*math.Abs(want) }

// TestEstimateOfTheBenchmark estimates the benchmark's own setting, which must give
// what was measured.
func TestEstimateOfTheBenchmark(t *testing.T) {
	in := usual()
	in.GenerationMaxClaims = 1_000_000
	e := Make(in)
	if !near(e.WorkerMicros, workerMicros) {
		t.Errorf("a worker takes %.1f µs, want %.1f", e.WorkerMicros, workerMicros)
	}
	// Filters don't fit in this setting: the look-ups come on top.
	if got := e.PostgresMicros - e.ProbeMicros; !near(got, postgresMicros) {
		t.Errorf("Postgres takes %.1f µs, want %.1f", got, postgresMicros)
	}
	if pages := float64(e.WALPagesPerDay) / 86400 / in.Rate; !near(e.WALBytesPerMessage-pages, 360) {
		t.Errorf("%.0f bytes of log a message, want 360", e.WALBytesPerMessage-pages)
	}
	for share, want := range map[float64]float64{0: 13.1, 0.5: 7.0} {
		in.Duplicates, in.FilterMemory = share, 1<<40
		if got := Make(in).PostgresMicros; math.Abs(got/want-1) > 0.1 {
			t.Errorf("with %.0f %% duplicates Postgres takes %.1f µs, measured were %.1f", 100*share, got, want)
		}
	}
}

func TestEstimate(t *testing.T) {
	in := usual()
	e := Make(in)
	if e.ClaimsPerSecond != 4000 || !e.CutByMaxClaims || e.GenerationSeconds != 5000 || e.ClaimsPerGeneration != 20_000_000 || e.Generations != 122 {
		t.Errorf("generations that are cut: %+v", e)
	}
	if e.Claims != 4000*(7*86400+5000) || e.FiltersFit || !near(float64(e.FilterBytes), 2.28*float64(e.Claims)) {
		t.Errorf("claims and filters: %+v", e)
	}
	fits := float64(in.FilterMemory) / filterBytes / 20e6
	if !near(e.Unfiltered, float64(e.Claims)/20e6-fits) || !near(e.Probes, 4000*e.Unfiltered) {
		t.Errorf("look-ups: %+v", e)
	}
	if e.MemoryBytes != (128+64+256)<<20 || e.Workers != 2 || e.WorkersNeeded != 1 || e.Connections != 8 || e.PostgresCoresPlan < 1 {
		t.Errorf("processes: %+v", e)
	}
	if e.HeldBytes <= 3*e.ClaimsBytes || !near(float64(e.ClaimsBytesPerDay), 4000*86400*e.BytesPerClaim) {
		t.Errorf("disk: %+v", e)
	}

	slow := in
	slow.Rate = 10
	if s := Make(slow); s.CutByMaxClaims || s.GenerationSeconds != 6*3600 || s.Generations != 29 || !s.FiltersFit || s.Probes != 0 || s.MemoryBytes >= e.MemoryBytes {
		t.Errorf("a slow one: %+v", s)
	}
	ordered := in
	ordered.ID = IDULID
	if o := Make(ordered); o.BytesPerClaim >= e.BytesPerClaim || o.WALBytesPerDay >= e.WALBytesPerDay || o.WALPagesPerDay != 0 || o.Probes != 0 || o.PostgresMicros >= e.PostgresMicros {
		t.Errorf("ordered ids are no cheaper: %+v", o)
	}
	// Whatever grows must not make anything smaller.
	for name, change := range map[string]func(*Input){
		"rate":         func(in *Input) { in.Rate *= 2 },
		"bytes":        func(in *Input) { in.MessageBytes *= 30 },
		"window":       func(in *Input) { in.Window *= 2 },
		"broker":       func(in *Input) { in.Broker = BrokerNATS },
		"sink's index": func(in *Input) { in.SinkIndex = true },
	} {
		more := in
		change(&more)
		m := Make(more)
		if m.WorkerCores < e.WorkerCores || m.PostgresCores < e.PostgresCores || m.ClaimsBytes < e.ClaimsBytes || m.WALBytesPerDay < e.WALBytesPerDay || m.Generations < e.Generations {
			t.Errorf("more of %s takes less: %+v", name, m)
		}
	}
	// Nothing overflows or vanishes at the ends.
	for _, rate := range []float64{0.001, 1e8} {
		for _, n := range []int64{0, 1 << 30} {
			for _, columns := range []int{0, 1, 1600} {
				x := in
				x.Rate, x.MessageBytes, x.Columns, x.Window, x.MaxHold = rate, n, columns, 10_000*24*time.Hour, 10_000*24*time.Hour
				if e := Make(x); e.PostgresCores <= 0 || e.WorkerCores <= 0 || e.ClaimsBytes <= 0 || e.WALBytesPerDay <= 0 || e.Workers < 1 || e.Generations < 2 || math.IsNaN(e.PostgresMicros) {
					t.Errorf("rate %v, %d bytes, %d columns: %+v", rate, n, columns, e)
				}
			}
		}
	}
}

func TestEstimateOfAQueue(t *testing.T) {
	in := usual()
	e := Make(in)
	queue := in
	queue.Broker = BrokerNATS
	q := Make(queue)
	if !near(q.WorkerMicros-e.WorkerMicros, workerMicrosNATS-workerMicros) || !near(q.PostgresMicros-e.PostgresMicros, postgresMicrosNATS-postgresMicros) || q.WALBytesPerDay != e.WALBytesPerDay {
		t.Errorf("a queue takes %.1f and %.1f µs, Kafka %.1f and %.1f", q.WorkerMicros, q.PostgresMicros, e.WorkerMicros, e.PostgresMicros)
	}
}

func TestEstimateOfTheSinksIndex(t *testing.T) {
	in := usual()
	e := Make(in)
	indexed := in
	indexed.SinkIndex = true
	x := Make(indexed)
	// What was measured is for each message of a topic a fifth of which is resent.
	if !near(x.PostgresMicros-e.PostgresMicros, postgresMicrosIndex-postgresMicrosNoIndex) || x.WorkerMicros != e.WorkerMicros {
		t.Errorf("with an index Postgres takes %.1f µs, without %.1f", x.PostgresMicros, e.PostgresMicros)
	}
	if !near(x.WALBytesPerMessage-e.WALBytesPerMessage, walBytesIndex-walBytesNoIndex) {
		t.Errorf("with an index a message takes %.0f bytes of log, without %.0f", x.WALBytesPerMessage, e.WALBytesPerMessage)
	}
}

func TestEstimateOfTheOpenIndex(t *testing.T) {
	in := usual()
	for n, grown := range map[int64]float64{fewClaims / 2: 0, fewClaims: 0, (fewClaims + manyClaims) / 2: 0.5, manyClaims: 1, 4 * manyClaims: 1} {
		open := in
		open.GenerationMaxClaims, open.FilterMemory = n, 1<<40
		want := postgresMicros + grown*(postgresMicrosManyClaims-postgresMicrosFewClaims)
		if got := Make(open); !near(got.PostgresMicros, want) || !near(float64(got.OpenIndexBytes), float64(n)*indexEntryBytes/indexFillRandom) {
			t.Errorf("with %d claims in the open generation Postgres takes %.1f µs, want %.1f; its index %d bytes", n, got.PostgresMicros, want, got.OpenIndexBytes)
		}
	}
}

func TestEstimateOfWorkers(t *testing.T) {
	in := usual()
	busiest := in
	busiest.Rate, busiest.MessageBytes = 500_000, 1024
	b := Make(busiest)
	cores := 500_000 * workerMicros1KiB / 1e6
	if !near(b.WorkerCores, cores) || b.WorkersNeeded != int(math.Ceil(cores/busy)) || b.Workers != b.WorkersNeeded || b.Connections != 4*b.Workers {
		t.Errorf("%.2f cores take %d of %d workers and %d connections", b.WorkerCores, b.WorkersNeeded, b.Workers, b.Connections)
	}
	busiest.Workers = 3
	three := Make(busiest)
	if three.Workers != 3 || three.WorkersNeeded != b.WorkersNeeded || three.Connections != 12 || !near(three.CoresPerWorker, cores/busy/3) {
		t.Errorf("three workers: %+v", three)
	}
	busiest.Workers = 1
	if one := Make(busiest); one.Workers != 1 || one.Connections != 4 {
		t.Errorf("one worker: %+v", one)
	}
}

func TestEstimateOfTheLog(t *testing.T) {
	in := usual()
	e := Make(in)
	plain := in
	plain.ID, plain.Duplicates = IDUUIDv7, 0 // no pages after checkpoints
	if got := Make(plain); !near(got.WALBytesPerMessage, walBytes) || !near(float64(got.WALBytesPerDay), walBytes*86400*in.Rate) {
		t.Errorf("%.0f bytes of log a message, %d a day", got.WALBytesPerMessage, got.WALBytesPerDay)
	}
	for bytes, want := range map[int64]float64{benchmarkBytes + 1000: walBytes + 1000, 0: walBytes - benchmarkBytes} {
		sized := plain
		sized.MessageBytes = bytes
		if got := Make(sized).WALBytesPerMessage; !near(got, want) {
			t.Errorf("%d bytes a value: %.0f bytes of log a message, want %.0f", bytes, got, want)
		}
		sized.Columns = 3 // the document isn't kept
		if got := Make(sized).WALBytesPerMessage; !near(got, walBytes) {
			t.Errorf("%d bytes a value, of which columns are kept: %.0f bytes of log a message", bytes, got)
		}
	}
	// Half of the index's pages are there on average, and all are touched between
	// checkpoints when there are many claims to each.
	pages := float64(e.OpenIndexBytes) / pageBytes / 2
	touched := pages * (1 - math.Exp(-4000*300/pages))
	if !near(float64(e.WALPagesPerDay), touched*pageBytes*indexFillRandom*288) || !near(float64(e.WALBytesPerDay), (walBytes*0.8*86400*in.Rate)+float64(e.WALPagesPerDay)) {
		t.Errorf("%d bytes of pages a day, of %d", e.WALPagesPerDay, e.WALBytesPerDay)
	}
	rarer := in
	rarer.Checkpoint *= 6
	if r := Make(rarer); r.WALPagesPerDay >= e.WALPagesPerDay {
		t.Errorf("rarer checkpoints: %d bytes of pages a day, not fewer than %d", r.WALPagesPerDay, e.WALPagesPerDay)
	}
}
