// Package sizing estimates what a scope takes: processors, connections, disk, log,
// memory. It computes from measured figures and asks no server.
package sizing

import (
	"math"
	"time"
)

// The kinds of ids. They differ in cost by the order of their keys.
const (
	IDUUID   = "uuid"   // random
	IDUUIDv7 = "uuidv7" // in the order of time
	IDULID   = "ulid"   // the same
	IDText   = "text"   // hashed, hence random
)

// IDs are all kinds.
var IDs = []string{IDUUID, IDUUIDv7, IDULID, IDText}

// The brokers.
const (
	BrokerKafka = "kafka"
	BrokerNATS  = "nats"
)

// Input is a scope's load and settings.
type Input struct {
	// Rate is messages a second, on average. Duplicates is the share of copies, from 0
	// to below 1.
	Rate         float64 `json:"rate"`
	Duplicates   float64 `json:"duplicates"`
	MessageBytes int64   `json:"message_bytes"`
	ID           string  `json:"id"`
	Broker       string  `json:"broker"`
	// Columns is how many typed columns the sink takes out of a document; 0: it keeps
	// the document.
	Columns int `json:"columns"`
	// SinkIndex: the sink's table has an index of random values.
	SinkIndex bool `json:"sink_index"`
	// Workers is how many processes run; 0: as many as needed, at least two.
	Workers int `json:"workers"`

	Window              time.Duration `json:"-"`
	Generation          time.Duration `json:"-"`
	GenerationMaxClaims int64         `json:"generation_max_claims"`
	FilterMemory        int64         `json:"filter_memory"`
	MaxHold             time.Duration `json:"-"`
	InflightBytes       int64         `json:"inflight_bytes"`
	MaxConnections      int           `json:"max_connections"`
	// Checkpoint is Postgres' checkpoint_timeout.
	Checkpoint time.Duration `json:"-"`
}

// Ordered reports whether ids come in the order of time.
func (in *Input) Ordered() bool { return in.ID == IDUUIDv7 || in.ID == IDULID }

// Estimate is what the load takes. Bytes are on disk unless a comment says otherwise.
type Estimate struct {
	ClaimsPerSecond float64 `json:"claims_per_second"`

	// WorkerMicros and PostgresMicros are processor time per message. The cores are
	// what that keeps busy; Plan is what to provide.
	WorkerMicros      float64 `json:"worker_micros"`
	WorkerCores       float64 `json:"worker_cores"`
	Workers           int     `json:"workers"`
	WorkersNeeded     int     `json:"workers_needed"`
	CoresPerWorker    float64 `json:"cores_per_worker"`
	PostgresMicros    float64 `json:"postgres_micros"`
	PostgresCores     float64 `json:"postgres_cores"`
	PostgresCoresPlan int     `json:"postgres_cores_plan"`
	Connections       int     `json:"connections"`

	// A generation stays open for GenerationSeconds. CutByMaxClaims: it is full before
	// its time.
	GenerationSeconds   float64 `json:"generation_seconds"`
	ClaimsPerGeneration int64   `json:"claims_per_generation"`
	CutByMaxClaims      bool    `json:"cut_by_max_claims"`
	Generations         int     `json:"generations"`

	// Claims is the most that are kept: those of the window and a generation. HeldBytes
	// is their size while a lane that doesn't move keeps them for max_hold.
	Claims             int64   `json:"claims"`
	BytesPerClaim      float64 `json:"bytes_per_claim"`
	ClaimsBytes        int64   `json:"claims_bytes"`
	ClaimsBytesPerDay  int64   `json:"claims_bytes_per_day"`
	HeldBytes          int64   `json:"held_bytes"`
	FilterTableBytes   int64   `json:"filter_table_bytes"`
	OpenIndexBytes     int64   `json:"open_index_bytes"` // in Postgres' memory
	WALBytesPerMessage float64 `json:"wal_bytes_per_message"`
	WALBytesPerDay     int64   `json:"wal_bytes_per_day"`
	// WALPagesPerDay is the part of it that is whole pages after checkpoints.
	WALPagesPerDay int64 `json:"wal_pages_per_day"`

	// FilterBytes is in each process's memory, if all filters are loaded. Unfiltered
	// counts the oldest generations, which don't fit; Probes are the look-ups a second
	// that they cost instead.
	FilterBytes int64   `json:"filter_bytes"`
	FiltersFit  bool    `json:"filters_fit"`
	Unfiltered  float64 `json:"unfiltered_generations"`
	Probes      float64 `json:"probes_per_second"`
	ProbeMicros float64 `json:"probe_micros"` // per message, part of PostgresMicros
	MemoryBytes int64   `json:"memory_bytes"` // a process's limit
	TooMany     bool    `json:"too_many_generations"`
}

// Make estimates what a load takes.
func Make(in Input) Estimate {
	var e Estimate
	fresh := 1 - in.Duplicates
	e.ClaimsPerSecond = in.Rate * fresh
	e.generations(&in)
	e.disk(&in)
	e.filters(&in)
	e.processors(&in, fresh)
	e.log(&in, fresh)
	e.MemoryBytes = in.InflightBytes + processBytes + min(e.FilterBytes, in.FilterMemory)
	return e
}

func (e *Estimate) generations(in *Input) {
	length := in.Generation.Seconds()
	if full := float64(in.GenerationMaxClaims) / e.ClaimsPerSecond; full < length {
		length, e.CutByMaxClaims = full, true
	}
	e.GenerationSeconds = length
	e.ClaimsPerGeneration = number(length * e.ClaimsPerSecond)
	e.Generations = int(min(math.Ceil(in.Window.Seconds()/length)+1, math.MaxInt32))
	e.TooMany = e.Generations > maxGenerations
}

func (e *Estimate) disk(in *Input) {
	const day = 24 * 60 * 60
	// The oldest generation is dropped as a whole, when its last claim is old enough.
	kept := e.ClaimsPerSecond * (in.Window.Seconds() + e.GenerationSeconds)
	e.Claims = number(kept)
	fill := indexFillRandom
	if in.Ordered() {
		fill = indexFillOrdered
	}
	e.BytesPerClaim = heapBytes + indexEntryBytes/fill
	e.ClaimsBytes = number(kept * e.BytesPerClaim)
	e.ClaimsBytesPerDay = number(e.ClaimsPerSecond * day * e.BytesPerClaim)
	held := max(in.MaxHold, in.Window).Seconds() + e.GenerationSeconds
	e.HeldBytes = number(e.ClaimsPerSecond * held * e.BytesPerClaim)
	e.FilterTableBytes = number(kept * filterBytes)
	e.OpenIndexBytes = number(float64(e.ClaimsPerGeneration) * indexEntryBytes / fill)
}

func (e *Estimate) filters(in *Input) {
	kept := e.ClaimsPerSecond * (in.Window.Seconds() + e.GenerationSeconds)
	e.FilterBytes = number(kept * filterBytes)
	e.FiltersFit = e.FilterBytes <= in.FilterMemory
	if e.FiltersFit || in.Ordered() {
		return // ordered ids end at the zone maps
	}
	e.Unfiltered = (kept*filterBytes - float64(in.FilterMemory)) / filterBytes / max(1, float64(e.ClaimsPerGeneration))
	e.Probes = e.ClaimsPerSecond * e.Unfiltered
}

func (e *Estimate) processors(in *Input, fresh float64) {
	n := float64(in.MessageBytes)
	worker := bySize(n, workerMicros, workerMicros1KiB, workerMicros8KiB)
	postgres := bySize(n, postgresMicros, postgresMicros1KiB, postgresMicros8KiB)
	if in.Columns > 0 {
		// The document's size costs only the worker: Postgres gets the columns.
		step := float64(in.Columns-3) / 9
		worker += max(0, workerMicros3Columns+(workerMicros12Columns-workerMicros3Columns)*step-workerMicros)
		postgres = max(postgresMicros3Columns/2, postgresMicros3Columns+(postgresMicros12Columns-postgresMicros3Columns)*step)
	}
	if in.Broker == BrokerNATS {
		worker += workerMicrosNATS - workerMicros
		postgres += postgresMicrosNATS - postgresMicros
	}
	switch {
	case in.Ordered():
		postgres = max(postgres/2, postgres-(postgresMicros-postgresMicrosOrdered))
	default:
		// The index of random claims outgrows the processor's caches.
		grown := (float64(e.ClaimsPerGeneration) - fewClaims) / (manyClaims - fewClaims)
		postgres += (postgresMicrosManyClaims - postgresMicrosFewClaims) * min(1, max(0, grown))
	}
	if in.SinkIndex {
		postgres += postgresMicrosIndex - postgresMicrosNoIndex
	}
	e.WorkerMicros = worker
	e.ProbeMicros = probeMicros * e.Probes / in.Rate
	e.PostgresMicros = perNew(postgres)*fresh + e.ProbeMicros
	e.WorkerCores = in.Rate * e.WorkerMicros / 1e6
	e.PostgresCores = in.Rate * e.PostgresMicros / 1e6
	e.PostgresCoresPlan = max(1, int(min(math.Ceil(e.PostgresCores/busy), math.MaxInt32)))
	// A worker is planned with one core.
	e.WorkersNeeded = max(1, int(min(math.Ceil(e.WorkerCores/busy), math.MaxInt32)))
	e.Workers = in.Workers
	if e.Workers == 0 {
		e.Workers = max(2, e.WorkersNeeded)
	}
	e.CoresPerWorker = e.WorkerCores / busy / float64(e.Workers)
	e.Connections = e.Workers * in.MaxConnections
}

func (e *Estimate) log(in *Input, fresh float64) {
	const day = 24 * 60 * 60
	row := float64(in.MessageBytes) - benchmarkBytes
	if in.Columns > 0 {
		row = 0 // the document isn't kept
	}
	wal := (walBytes + row) * fresh
	if in.SinkIndex {
		wal += perNew(walBytesIndex-walBytesNoIndex) * fresh
	}
	// After each checkpoint, the first change of a page logs all of the page that is
	// used. Random claims reach every page of the open generation's index, which is on
	// average half its final size.
	if !in.Ordered() {
		pages := float64(e.OpenIndexBytes) / pageBytes / 2
		touched := pages * (1 - math.Exp(-e.ClaimsPerSecond*in.Checkpoint.Seconds()/max(1, pages)))
		e.WALPagesPerDay = number(touched * pageBytes * indexFillRandom * day / in.Checkpoint.Seconds())
	}
	perDay := wal*in.Rate*day + float64(e.WALPagesPerDay)
	e.WALBytesPerDay = number(perDay)
	e.WALBytesPerMessage = perDay / day / in.Rate
}

// number rounds up to an integer, and caps what no int64 holds.
func number(f float64) int64 { return int64(min(math.Ceil(f), 1<<62)) }
