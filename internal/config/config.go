// Package config reads dedupd's YAML file, strictly. It reports every problem at
// once, each with its place. A few environment variables override the file. Each kind
// of sink decodes its own part.
package config

import "github.com/dedupd/dedupd/internal/policy"

// Config is the whole configuration. Load fills in the defaults. Durations are never
// negative; sizes are bytes.
type Config struct {
	// Several scopes in one process: a list of what else is a whole file each. http, log, shutdown and batch.inflight_bytes stand above it, and so may any other key, as the default of all; but for scope.
	Pipelines []*Config `yaml:"pipelines"`
	// The consumer's name; ids are unique within it. Lower-case letters, digits, _ and -, at most 40.
	Scope string `yaml:"scope" required:"true"`
	// Where messages come from: one or several. A duplicate that came by another source is still a duplicate.
	Sources []Source `yaml:"sources" required:"true"`
	// The Postgres that holds the claims and the sink's tables.
	Database Database `yaml:"database"`
	// Where a message's id is found.
	ID ID `yaml:"id"`
	// What happens to duplicates.
	Dedup Dedup `yaml:"dedup"`
	// Which messages are wanted, by their places: {json:type: [created, changed]}, {json:type: {not: [test]}}, {header:x: absent}; all must hold. The others are filtered: counted, and not claimed.
	Filter Filter `yaml:"filter"`
	// What a message does: one kind of sink, which decodes its own keys, and beside it perhaps a filter; or a list of such, all in one transaction.
	Sink Sinks `yaml:"sink" required:"true"`
	// How much goes into one transaction and into memory.
	Batch Batch `yaml:"batch"`
	// How long claims are kept.
	Retention Retention `yaml:"retention"`
	// How many messages may fail before a lane stops, and how long they are kept.
	DeadLetters DeadLetters `yaml:"dead_letters"`
	// The server for /metrics, /livez, /readyz and /startupz.
	HTTP HTTP `yaml:"http"`
	// How the worker stops.
	Shutdown Shutdown `yaml:"shutdown"`
	// The log, on stderr.
	Log Log `yaml:"log"`

	places map[string]place // by key path
	file   string
}

// Source is one broker subscription: Kafka or NATS, exactly one of them.
type Source struct {
	// The source's name in lanes, logs and metrics; unique. Default: the kind.
	Name string `yaml:"name"`
	// A Kafka consumer group.
	Kafka *Kafka `yaml:"kafka"`
	// A NATS JetStream consumer.
	NATS *NATS `yaml:"nats"`
}

// Kafka is a consumer group's subscription.
type Kafka struct {
	// Brokers to connect to first, as host:port; a list, or text with commas.
	Brokers Addresses `yaml:"brokers" required:"true"`
	// Topics to read.
	Topics StringList `yaml:"topics" required:"true"`
	// The consumer group. Default: the scope.
	Group string `yaml:"group"`
	// Where a lane without a position begins if the group has committed none either; group: nowhere, the lane is held until the group has.
	Start policy.Start `yaml:"start"`
	// Whether to read messages of open and aborted transactions.
	Isolation policy.Isolation `yaml:"isolation"`
	// An operator moved the group's offsets back: read again from there, or ignore it.
	OnGroupReset policy.GroupReset `yaml:"on_group_reset"`
	// The broker no longer has the next position: stop the lane, or skip to what is left.
	OnGap policy.Gap `yaml:"on_gap"`
	// Encryption, and the client's certificate.
	TLS TLS `yaml:"tls"`
	// How to log in to the brokers.
	SASL SASL `yaml:"sasl"`
}

// NATS is a JetStream consumer of one stream.
type NATS struct {
	// Servers as nats:// or tls:// URLs; a list, or text with commas.
	Servers Addresses `yaml:"servers" required:"true"`
	// The stream's name.
	Stream string `yaml:"stream" required:"true"`
	// Subjects to take from the stream. Default: all.
	Subjects StringList `yaml:"subjects"`
	// The durable consumer's name. Default: the scope.
	Durable string `yaml:"durable"`
	// queue: elastic and unordered; lanes: ordered (not in this version yet).
	Mode policy.Mode `yaml:"mode"`
	// Mode lanes: the number of partitions.
	Lanes int `yaml:"lanes" min:"0" max:"1024"`
	// Where a new durable consumer begins.
	Start policy.QueueStart `yaml:"start"`
	// The most unacknowledged messages that all workers together may have; 0: ample, or as many as the server allows.
	MaxAckPending int `yaml:"max_ack_pending" min:"0"`
	// The stream discarded messages before they were read: stop the queue, or skip to what is left.
	OnGap policy.Gap `yaml:"on_gap"`
	// A credentials file (JWT and seed); read again at each connect.
	CredsFile string `yaml:"creds_file"`
	// A file with the nkey's seed.
	NKeySeedFile string `yaml:"nkey_seed_file"`
	// Encryption, and the client's certificate.
	TLS TLS `yaml:"tls"`
}

// TLS says how to encrypt a broker connection. All files are PEM.
type TLS struct {
	// Whether to encrypt.
	Enabled bool `yaml:"enabled"`
	// The authorities that may sign the server's certificate. Default: the system's.
	CAFile string `yaml:"ca_file"`
	// The client's certificate; with key_file.
	CertFile string `yaml:"cert_file"`
	// The client's private key; with cert_file.
	KeyFile string `yaml:"key_file"`
	// The name the server's certificate must carry. Default: the host connected to.
	ServerName string `yaml:"server_name"`
}

// SASL says how to log in to Kafka. An empty mechanism: not at all.
type SASL struct {
	// The mechanism; empty: none. oauthbearer: not in this version yet.
	Mechanism policy.Mechanism `yaml:"mechanism"`
	// The user name.
	Username string `yaml:"username"`
	// The password.
	Password Secret `yaml:"password"`
	// A file with the password, instead of it; read again at each connect.
	PasswordFile string `yaml:"password_file"`
}

// Database is the Postgres that holds claims, lanes and the sink's tables.
type Database struct {
	// A postgres:// URL or key=value text, as pgx takes it. Default: the PG* variables.
	URL Secret `yaml:"url"`
	// A file with the URL, instead of it; read again at each connect.
	URLFile string `yaml:"url_file"`
	// The schema of dedupd's own tables.
	Schema string `yaml:"schema"`
	// The most connections; one serves retention and lanes, the others write.
	MaxConnections int `yaml:"max_connections" min:"2" max:"1000"`
	// Whether to upgrade the schema at start, under a lock; false: refuse an old schema.
	Migrate bool `yaml:"migrate"`
	// The pooler between us and Postgres.
	Pooler Pooler `yaml:"pooler"`
}

// ID says where a message's id is.
type ID struct {
	// header:NAME, key, json:PATH, cloudevent, nats-msg-id or position; a list of them is joined.
	From StringList `yaml:"from"`
	// What happens to a message without an id; position: its position is its id.
	Missing policy.Missing `yaml:"missing"`
	// The longest id; a message with a longer one becomes a dead letter.
	MaxBytes Size `yaml:"max_bytes"`
}

// Dedup says what happens to a message whose id was seen before.
type Dedup struct {
	// claim: each id once; position: each position once, whatever was sent twice; sequence: each of a producer's numbers once.
	Strategy policy.Strategy `yaml:"strategy"`
	// What happens to a duplicate. reply: not in this version yet.
	OnDuplicate policy.Duplicate `yaml:"on_duplicate"`
	// What happens to a message with a known id and another payload.
	OnConflict policy.Conflict `yaml:"on_conflict"`
	// What must be equal for two messages to be copies: value, none, or one or several json:PATH.
	Fingerprint StringList `yaml:"fingerprint"`
	// Strategy sequence.
	Sequence Sequence `yaml:"sequence"`
}

// Sequence says where strategy sequence finds producer and number.
type Sequence struct {
	// Who produced the message: a place, or a list of them.
	Producer StringList `yaml:"producer"`
	// The producer's sequence number.
	Seq string `yaml:"seq"`
	// A number that rises when a producer begins its sequence numbers anew; empty: none does.
	Epoch string `yaml:"epoch"`
	// What a missing number means.
	Gaps policy.SequenceGap `yaml:"gaps"`
}

// Batch bounds one transaction, and memory.
type Batch struct {
	// The most messages in one transaction.
	MaxMessages int `yaml:"max_messages" min:"1" max:"100000"`
	// The most bytes of messages in one transaction; a larger message goes alone.
	MaxBytes Size `yaml:"max_bytes"`
	// The most bytes of messages in memory, over all sources. Several pipelines have equal parts of it.
	InflightBytes Size `yaml:"inflight_bytes"`
	// The most that one of Kafka's record batches may take in memory, decompressed; a larger one holds its lane. Default: inflight_bytes.
	MaxInflatedBytes Size `yaml:"max_inflated_bytes"`
}

// Retention says how long claims are kept, in stream time.
type Retention struct {
	// Claims are kept at least this long; copies that come later are applied again.
	Window Duration `yaml:"window"`
	// How long one generation of claims stays open.
	Generation Duration `yaml:"generation"`
	// Or until it holds this many claims.
	GenerationMaxClaims int64 `yaml:"generation_max_claims" min:"1000"`
	// Memory for sealed generations' filters; generations beyond it are probed through their index.
	FilterMemory Size `yaml:"filter_memory"`
	// How often the leader checks what to seal and drop.
	Schedule Duration `yaml:"schedule"`
	// A lane that never moves keeps claims no longer than this.
	MaxHold Duration `yaml:"max_hold"`
}

// DeadLetters bounds the messages that can't be applied.
type DeadLetters struct {
	// The share of poison among a lane's last messages above which the lane stops.
	MaxShare float64 `yaml:"max_share" min:"0" max:"1"`
	// How many last messages count for that share.
	Window int `yaml:"window" min:"1" max:"1000000"`
	// How long dead letters are kept.
	Retention Duration `yaml:"retention"`
}

// HTTP is the operators' server.
type HTTP struct {
	// Where to listen, as host:port. Port 0: any free one.
	Listen string `yaml:"listen"`
	// Whether to serve /debug/pprof.
	Pprof bool `yaml:"pprof"`
}

// Shutdown says how the worker stops.
type Shutdown struct {
	// How long in-flight transactions may still take.
	Drain Duration `yaml:"drain"`
}

// Log is what goes to stderr.
type Log struct {
	// The lowest level that is logged.
	Level LogLevel `yaml:"level"`
	// text for people, json for machines.
	Format LogFormat `yaml:"format"`
}
