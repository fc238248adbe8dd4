-- The tables of dedupd. {{schema}} is replaced by the quoted name of its schema.
-- Everything is named with its schema: behind a pooler the search path may be
-- anything.

-- A scope is a consumer's name; ids are unique within it. catalog_epoch rises
-- with every change of the scope's generations: a claim transaction built for an
-- older one is refused by enter().
CREATE TABLE {{schema}}.scopes (
    id            integer GENERATED ALWAYS AS IDENTITY,
    scope         text NOT NULL,
    catalog_epoch bigint NOT NULL DEFAULT 1,
    created_at    timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT scopes_pkey PRIMARY KEY (id),
    CONSTRAINT scopes_scope_key UNIQUE (scope)
);

-- The catalog of generations. The identity is random: after a failover the same
-- number may come to mean another table, so whatever a process remembers about a
-- generation belongs to its identity.
CREATE TABLE {{schema}}.generations (
    scope      text NOT NULL,
    generation integer NOT NULL,
    identity   uuid NOT NULL DEFAULT gen_random_uuid(),
    table_name text NOT NULL,
    state      text NOT NULL,
    opened_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT generations_pkey PRIMARY KEY (scope, generation),
    CONSTRAINT generations_table_name_key UNIQUE (table_name),
    CONSTRAINT generations_scope_fkey FOREIGN KEY (scope) REFERENCES {{schema}}.scopes (scope),
    CONSTRAINT generations_state_check CHECK (state IN ('open', 'sealed'))
);
-- Two open generations could both take the same key.
CREATE UNIQUE INDEX generations_one_open ON {{schema}}.generations (scope) WHERE state = 'open';

-- The parent of every claims_<scope>_<generation>. It never holds a row itself;
-- it gives the view "claims" one name for all of them. Plain inheritance and not
-- partitions: a partitioned table's primary key would have to contain the
-- partition column, and dropping a partition locks the parent.
--
-- lane and position are NULL for claims that came by no lane; fingerprint is
-- NULL where payloads are not compared. Wide columns first: no padding.
CREATE TABLE {{schema}}.claims_root (
    key         uuid NOT NULL,
    claimed_at  timestamptz NOT NULL DEFAULT now(),
    fingerprint bigint,
    position    bigint,
    lane        integer
);

-- One row for each lane: fence, resume point and books in one, moved by
-- compare-and-set in the transaction of the effects. The fill factor leaves room
-- for HOT updates: no index but the keys, whose columns never change.
CREATE TABLE {{schema}}.lanes (
    id                integer GENERATED ALWAYS AS IDENTITY,
    scope             text NOT NULL,
    source            text NOT NULL,
    lane              text NOT NULL,
    ordered           boolean NOT NULL,
    incarnation       text NOT NULL,
    epoch             bigint NOT NULL,
    broker_generation bigint NOT NULL,
    owner             text NOT NULL,
    next_position     bigint NOT NULL,
    broker_position   bigint,
    stream_time       timestamptz,
    lag               bigint,
    fetched           bigint NOT NULL DEFAULT 0,
    applied           bigint NOT NULL DEFAULT 0,
    redelivered       bigint NOT NULL DEFAULT 0,
    resent            bigint NOT NULL DEFAULT 0,
    cross_source      bigint NOT NULL DEFAULT 0,
    conflicts         bigint NOT NULL DEFAULT 0,
    dead              bigint NOT NULL DEFAULT 0,
    claimed_at        timestamptz NOT NULL DEFAULT now(),
    updated_at        timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT lanes_pkey PRIMARY KEY (id),
    CONSTRAINT lanes_lane_key UNIQUE (scope, source, lane),
    CONSTRAINT lanes_scope_fkey FOREIGN KEY (scope) REFERENCES {{schema}}.scopes (scope),
    -- Every message has exactly one outcome, at every commit.
    CONSTRAINT lanes_books_balance CHECK (fetched = applied + redelivered + resent + cross_source + conflicts + dead)
) WITH (fillfactor = 50);

-- Messages that had no effect in the sink, kept whole and raw: bytea, since what
-- is wrong with them may be their very bytes.
CREATE TABLE {{schema}}.dead_letters (
    id                bigint GENERATED ALWAYS AS IDENTITY,
    scope             text NOT NULL,
    source            text NOT NULL,
    lane              text NOT NULL,
    position          bigint NOT NULL,
    class             text NOT NULL,
    reason            text NOT NULL,
    sqlstate          text,
    claim_key         uuid NOT NULL,
    message_id        bytea,
    topic             bytea NOT NULL,
    key               bytea,
    value             bytea,
    header_keys       bytea[] NOT NULL,
    header_values     bytea[] NOT NULL,
    broker_time       timestamptz,
    original_lane     integer,
    original_position bigint,
    created_at        timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT dead_letters_pkey PRIMARY KEY (id)
);
-- A queue may deliver a conflict or a duplicate again after it was buried.
CREATE UNIQUE INDEX dead_letters_place ON {{schema}}.dead_letters (scope, source, lane, position, class, claim_key);
CREATE INDEX dead_letters_scope_created_at ON {{schema}}.dead_letters (scope, created_at);

-- enter() opens a claim transaction: it waits for a rotation that is under way,
-- keeps the next one out until the transaction ends, and refuses a transaction
-- that was built for an older catalog. It must be a statement of its own: the
-- claims that follow need a snapshot taken after the lock. (VOLATILE, so that the
-- check below sees what was committed while the lock was waited for.)
--
-- The time-outs are set here, and not for the session, since behind a pooler a
-- session is somebody else's a moment later. synchronous_commit is never lowered:
-- only "off" is raised, for an acknowledged message must survive a crash.
CREATE FUNCTION {{schema}}.enter(p_scope_id integer, p_catalog_epoch bigint, p_lock_timeout text, p_statement_timeout text, p_idle_timeout text)
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', p_lock_timeout, true),
            pg_catalog.set_config('statement_timeout', p_statement_timeout, true),
            pg_catalog.set_config('idle_in_transaction_session_timeout', p_idle_timeout, true),
            pg_catalog.set_config('dedupd.entered', 'yes', true);
    IF pg_catalog.current_setting('synchronous_commit') = 'off' THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM pg_catalog.pg_advisory_xact_lock_shared({{rotation_lock}}, p_scope_id);
    IF NOT EXISTS (SELECT FROM {{schema}}.scopes WHERE id = p_scope_id AND catalog_epoch = p_catalog_epoch) THEN
        RAISE EXCEPTION 'the catalog of generations has changed' USING ERRCODE = 'DD002';
    END IF;
END $$;

-- advance() moves one lane and books what became of its messages. It raises an
-- error when another worker has the lane or the lane isn't where the batch
-- started, so that COMMIT can be sent behind it without waiting for its answer:
-- a zero-row update is no error, and a fenced worker's writes would be committed.
--
-- It also refuses a transaction that enter() has not opened: a sink that ends the
-- one it was given and begins another would leave effects without claims, or
-- claims without effects. The mark is gone with the end of its transaction.
--
-- A lane without order (p_from is NULL) has no position to compare; its epoch only
-- says that it is still the same row.
CREATE FUNCTION {{schema}}.advance(
    p_lane integer, p_epoch bigint, p_from bigint, p_next bigint, p_broker_position bigint, p_stream_time timestamptz, p_lag bigint,
    p_applied bigint, p_redelivered bigint, p_resent bigint, p_cross_source bigint, p_conflicts bigint, p_dead bigint)
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF pg_catalog.current_setting('dedupd.entered', true) IS DISTINCT FROM 'yes' THEN
        RAISE EXCEPTION 'the sink ended the transaction it was given: it must neither commit nor roll back' USING ERRCODE = 'DD003';
    END IF;
    UPDATE {{schema}}.lanes SET
        next_position   = CASE WHEN p_from IS NULL THEN greatest(next_position, p_next) ELSE p_next END,
        broker_position = coalesce(p_broker_position, broker_position),
        -- Producers may set timestamps; the database's clock bounds them.
        stream_time     = greatest(stream_time, least(p_stream_time, now())),
        lag             = coalesce(p_lag, lag),
        fetched         = fetched + p_applied + p_redelivered + p_resent + p_cross_source + p_conflicts + p_dead,
        applied         = applied + p_applied,
        redelivered     = redelivered + p_redelivered,
        resent          = resent + p_resent,
        cross_source    = cross_source + p_cross_source,
        conflicts       = conflicts + p_conflicts,
        dead            = dead + p_dead,
        updated_at      = now()
    WHERE id = p_lane AND epoch = p_epoch AND (p_from IS NULL OR next_position = p_from);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'lane % is fenced', p_lane USING ERRCODE = 'DD001';
    END IF;
END $$;

-- For people with psql.
CREATE VIEW {{schema}}.books AS
SELECT scope, source, lane, fetched, applied,
       redelivered + resent + cross_source AS duplicates,
       redelivered, resent, cross_source, conflicts, dead,
       next_position, lag, stream_time, owner, updated_at
FROM {{schema}}.lanes;

CREATE VIEW {{schema}}.claims AS
SELECT g.scope, g.generation, c.key, c.fingerprint, l.source, l.lane, c.position, c.claimed_at
FROM {{schema}}.claims_root c
JOIN pg_catalog.pg_class t ON t.oid = c.tableoid
JOIN {{schema}}.generations g ON g.table_name = t.relname
LEFT JOIN {{schema}}.lanes l ON l.id = c.lane;
