package sizing

// The figures behind the estimates. Each was measured, or follows from one that was.
// A test compares them with docs/benchmarks. They come from one machine, Setting:
// another may be twice as fast, or half.

// Setting is where the figures come from.
const Setting = "an Intel Xeon of 2 cores shared by broker, worker and Postgres (docs/benchmarks); another machine may be twice as fast, or half"

const (
	// benchmarkDuplicates is the share of resends in the measured topic,
	// benchmarkBytes about the size of a message's value.
	benchmarkDuplicates = 0.2
	benchmarkBytes      = 200

	// workerMicros and postgresMicros are processor time per message of that topic,
	// through Kafka, with a uuid and a jsonb. docs/benchmarks/throughput.md: dedupd.
	workerMicros   = 3.0
	postgresMicros = 11.2
	// The same with values of 1 KiB and of 8 KiB, where Postgres compresses them.
	workerMicros1KiB   = 5.4
	postgresMicros1KiB = 14.3
	workerMicros8KiB   = 32.5
	postgresMicros8KiB = 273.3
	// postgresMicrosOrdered is with UUIDv7.
	postgresMicrosOrdered = 8.3
	// The same through a NATS queue.
	workerMicrosNATS   = 8.6
	postgresMicrosNATS = 13.0
	// With typed columns, taken out of the document.
	workerMicros3Columns    = 3.8
	postgresMicros3Columns  = 7.2
	workerMicros12Columns   = 8.5
	postgresMicros12Columns = 10.3
	// Postgres' time with fewClaims random claims in the open generation, and with
	// manyClaims or more; and without and with a primary key of random ids on the
	// sink's table, at 20 million rows. docs/benchmarks/growth.md.
	postgresMicrosFewClaims  = 10.9
	postgresMicrosManyClaims = 17.7
	postgresMicrosNoIndex    = 17.6
	postgresMicrosIndex      = 29.0
	fewClaims                = 1_000_000
	manyClaims               = 5_000_000

	// walBytes is the log of a new message of benchmarkBytes, without what checkpoints
	// add: throughput.md, 0 % resent. Duplicates cost next to none (50 % resent: half
	// of it). Each further byte adds a byte up to 2 KiB (1 KiB: 1016 B with a fifth
	// resent); beyond, Postgres compresses what it can.
	walBytes = 448
	// The log per message without an index on the sink's table, and with one of random
	// ids, at 20 million rows. growth.md.
	walBytesNoIndex = 356
	walBytesIndex   = 2130

	// heapBytes is a claim's space in its table: tuple header 24, key 16, time 8,
	// fingerprint 8, position 8, lane 4, in all 72 aligned, and its pointer 4, in pages
	// of 8192 less a header of 24. As dedup's bytesPerClaim.
	heapBytes = 76.4
	// indexEntryBytes is its space in the index: header 8, key 16, pointer 4. Random
	// keys fill pages to two thirds, ordered ones to nine tenths. A test inserts claims
	// and measures.
	indexEntryBytes  = 28
	indexFillRandom  = 0.68
	indexFillOrdered = 0.90
	pageBytes        = 8192

	// filterBytes is a claim's space in a filter. retention.md, Filters.
	filterBytes = 2.28
	// probeMicros is a look-up of an id in a table whose index is in memory: a seventh
	// of Postgres' time for a message. docs/decisions/0015.
	probeMicros = postgresMicros / 7

	// processBytes is a process's memory beside batch.inflight_bytes and its filters.
	// docs/operations.md, Memory.
	processBytes = 64 << 20

	// busy is the share of a core to plan with. The rest is for peaks, for catching up
	// after an outage, and for everything else.
	busy = 0.5
	// maxGenerations is the most that the configuration allows in a window.
	maxGenerations = 1000
)

// perNew turns a figure of the measured topic into one per new message: nearly all
// work is done for those.
func perNew(measured float64) float64 { return measured / (1 - benchmarkDuplicates) }

// bySize is the cost of a message by the size of its value: lines through what was
// measured with 200 B, 1 KiB and 8 KiB, extended beyond.
func bySize(n, small, medium, large float64) float64 {
	const kib = 1024
	if n <= kib {
		return max(small*0.8, small+(medium-small)*(n-benchmarkBytes)/(kib-benchmarkBytes))
	}
	return medium + (large-medium)*(n-kib)/(7*kib)
}
