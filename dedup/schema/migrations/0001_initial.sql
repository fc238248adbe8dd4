-- The tables and functions of dedupd. {{schema}} stands for the quoted name of their
-- schema. Every name carries its schema: behind a pooler the search path may be anything.
--
-- Until the first release this file is edited in place. Later changes come as numbered
-- files beside it.

-- The database's clock. It decides everything about claims; no worker's clock does. It is
-- a function so that a test can move it.
CREATE FUNCTION {{schema}}.clock() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT pg_catalog.now()';

-- A scope is a consumer's name; ids are unique within it.
--
-- catalog is random, and new with every change of the scope's generations. A claim
-- transaction names the catalog that it was built for, and enter() refuses any other. A
-- counter couldn't tell timelines apart: after a failover or a restore that lost a
-- rotation, the same number would come again with other tables behind it.
-- catalog_epoch counts the changes, for people.
--
-- id_from is where workers find a message's id, as they were last configured, since
-- id_from_since; id_from_before is where it was until then. NULL: not told. In the same way
-- strategy is how they tell copies.
CREATE TABLE {{schema}}.scopes (
    id            integer GENERATED ALWAYS AS IDENTITY,
    scope         text NOT NULL,
    catalog       uuid NOT NULL DEFAULT gen_random_uuid(),
    catalog_epoch bigint NOT NULL DEFAULT 1,
    created_at    timestamptz NOT NULL DEFAULT now(),
    id_from        text,
    id_from_before text,
    id_from_since  timestamptz,
    strategy        text,
    strategy_before text,
    strategy_since  timestamptz,
    CONSTRAINT scopes_pkey PRIMARY KEY (id),
    CONSTRAINT scopes_scope_key UNIQUE (scope)
);

-- The catalog of generations.
--   next: made ahead of time, and empty.
--   open: takes claims.
--   sealed: never written again.
--   dropping: out of the catalog; its table is still to be dropped.
--
-- identity is random, and new with the seal: what a process remembers of a sealed table (a
-- filter) belongs to one seal. After a failover the same number may mean another table,
-- and a database that lost the seal may seal the same table again with other claims in it.
--
-- first_key and last_key are the zone map. They are NULL if the generation was empty when
-- it was sealed.
CREATE TABLE {{schema}}.generations (
    scope      text NOT NULL,
    generation integer NOT NULL,
    identity   uuid NOT NULL DEFAULT gen_random_uuid(),
    table_name text NOT NULL,
    state      text NOT NULL,
    opened_at  timestamptz NOT NULL DEFAULT now(),
    sealed_at  timestamptz,
    first_key  uuid,
    last_key   uuid,
    CONSTRAINT generations_pkey PRIMARY KEY (scope, generation),
    CONSTRAINT generations_table_name_key UNIQUE (table_name),
    CONSTRAINT generations_identity_key UNIQUE (identity),
    CONSTRAINT generations_scope_fkey FOREIGN KEY (scope) REFERENCES {{schema}}.scopes (scope),
    CONSTRAINT generations_state_check CHECK (state IN ('next', 'open', 'sealed', 'dropping')),
    CONSTRAINT generations_sealed_check CHECK ((sealed_at IS NOT NULL) = (state IN ('sealed', 'dropping')))
);
-- Two open generations could both take one key.
CREATE UNIQUE INDEX generations_one_open ON {{schema}}.generations (scope) WHERE state = 'open';
CREATE UNIQUE INDEX generations_one_next ON {{schema}}.generations (scope) WHERE state = 'next';

-- The parent of every claims_<scope>_<generation>. It never holds a row itself; it is one
-- name for all of them, for the view "claims". Inheritance and not partitions: a
-- partitioned table's primary key has to contain the partition column, and dropping a
-- partition locks the parent.
--
-- lane and position are NULL for claims that came by no lane. fingerprint is NULL where
-- payloads aren't compared. Wide columns come first, so that there is no padding.
CREATE TABLE {{schema}}.claims_root (
    key         uuid NOT NULL,
    claimed_at  timestamptz NOT NULL DEFAULT {{schema}}.clock(),
    fingerprint bigint,
    position    bigint,
    lane        integer
);

-- The parent of every results_<scope>_<generation>: what whoever applied a message wants its
-- duplicates to be told. A result has the key of its claim, is written in the claim's
-- transaction or by the replay of its dead letter, and goes with the claim's generation. It
-- isn't a column of the claims: it is known only after they are written, and most have none.
-- size is the result's, also where it was too large to keep, and NULL.
CREATE TABLE {{schema}}.results_root (
    key    uuid NOT NULL,
    size   integer NOT NULL,
    result bytea
);

-- The filters of sealed generations, in chunks. Chunk n covers the keys above chunk n-1's
-- last_key, up to its own. last marks a generation's final chunk. The checksum covers the
-- rest of the row.
CREATE TABLE {{schema}}.filters (
    identity uuid NOT NULL,
    chunk    integer NOT NULL,
    claims   integer NOT NULL,
    last_key uuid NOT NULL,
    last     boolean NOT NULL,
    checksum bigint NOT NULL,
    data     bytea NOT NULL,
    CONSTRAINT filters_pkey PRIMARY KEY (identity, chunk)
);
-- Fingerprints don't compress.
ALTER TABLE {{schema}}.filters ALTER COLUMN data SET STORAGE EXTERNAL;

-- One row for each lane is fence, resume point and books. The transaction that applies
-- the messages moves it by compare-and-set. The fill factor leaves room for HOT updates:
-- only the keys are indexed, and their columns never change.
--
-- stream_id is log_id/uuid. It is new with each row, with each log that the lane is set to
-- read, and where such a log was cut. What is known by its position is known by this too.
-- log_id is the broker's own id of the log: a Kafka topic's id, or the creation time of a
-- NATS stream. A log that was deleted and created anew holds other messages at the same
-- positions. NULL: the broker has no such id.
-- repositioned: an operator has set the position since the lane was acquired. It then holds
-- for whatever log is found.
-- start_position is the lowest position of the present log that the lane began at or was
-- set to. Nothing below it was applied. NULL: not known.
-- partitions is how many the lane's topic had when the lane was first acquired. NULL: the
-- lane is no partition.
-- leader_epochs are those of the Kafka leaders that wrote what the lane has read: epoch,
-- first position, and so on. The log below next_position must still be theirs. NULL: not
-- known.
-- cut_at is where the log was found cut, below next_position. NULL: it wasn't, or somebody
-- has decided since.
-- checkpoint is a queue's, and only rises. The broker keeps it beside what was acknowledged
-- and the workers remember it, so a row below it is seen to have gone back. An ordered lane
-- has its position for that.
-- acquisitions counts how often an ordered lane was acquired since it last moved, was
-- caught up, or was released properly.
-- filtered are those that no sink wants: they have claimed nothing.
-- applied is split by what the sink says of a message: it has written it; or the target had
-- it, has a newer state, or isn't in the state that the message expects.
-- recent_dead are the lane's last dead letters, by their numbers as fetched counts them. A
-- worker that ends must not make its successors forget how many there were.
CREATE TABLE {{schema}}.lanes (
    id               integer GENERATED ALWAYS AS IDENTITY,
    scope            text NOT NULL,
    source           text NOT NULL,
    lane             text NOT NULL,
    ordered          boolean NOT NULL,
    epoch            bigint NOT NULL,
    owner            text NOT NULL,
    acquired_at      timestamptz NOT NULL DEFAULT now(),
    acquisitions     integer NOT NULL DEFAULT 0,
    group_generation bigint NOT NULL,
    stream_id        text NOT NULL,
    log_id           text,
    start_position   bigint,
    next_position    bigint NOT NULL,
    repositioned     boolean NOT NULL DEFAULT false,
    broker_position  bigint,
    partitions       integer,
    leader_epochs    bigint[],
    cut_at           bigint,
    checkpoint       bigint NOT NULL DEFAULT 0,
    stream_time      timestamptz,
    lag              bigint,
    fetched          bigint NOT NULL DEFAULT 0,
    applied          bigint NOT NULL GENERATED ALWAYS AS (written + already_present + stale + rejected) STORED,
    written          bigint NOT NULL DEFAULT 0,
    already_present  bigint NOT NULL DEFAULT 0,
    stale            bigint NOT NULL DEFAULT 0,
    rejected         bigint NOT NULL DEFAULT 0,
    redelivered      bigint NOT NULL DEFAULT 0,
    resent           bigint NOT NULL DEFAULT 0,
    cross_source     bigint NOT NULL DEFAULT 0,
    conflicts        bigint NOT NULL DEFAULT 0,
    dead             bigint NOT NULL DEFAULT 0,
    filtered         bigint NOT NULL DEFAULT 0,
    recent_dead      bigint[] NOT NULL DEFAULT '{}',
    updated_at       timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT lanes_pkey PRIMARY KEY (id),
    CONSTRAINT lanes_lane_key UNIQUE (scope, source, lane),
    CONSTRAINT lanes_scope_fkey FOREIGN KEY (scope) REFERENCES {{schema}}.scopes (scope),
    -- Every message has exactly one outcome, at every commit.
    CONSTRAINT lanes_books_balance CHECK (fetched = applied + redelivered + resent + cross_source + conflicts + dead + filtered)
) WITH (fillfactor = 50);

-- How far producers that number their messages have come, with strategy sequence: one row
-- for each. producer is the key of its name. position is that of the message with the
-- number. A mark belongs to the lane that it came by. If
-- that is gone, the next one takes over. The fill factor leaves room for HOT updates.
CREATE TABLE {{schema}}.sequences (
    scope_id integer NOT NULL,
    producer uuid NOT NULL,
    lane     integer NOT NULL,
    epoch    bigint NOT NULL,
    number   bigint NOT NULL,
    position bigint NOT NULL,
    seen_at  timestamptz NOT NULL DEFAULT {{schema}}.clock(),
    name     bytea NOT NULL,
    CONSTRAINT sequences_pkey PRIMARY KEY (scope_id, producer),
    CONSTRAINT sequences_scope_fkey FOREIGN KEY (scope_id) REFERENCES {{schema}}.scopes (id)
) WITH (fillfactor = 50);

-- A lane that goes on in another log, or in one that was cut, has other messages in the same
-- positions: none of them is one that its marks have seen.
CREATE FUNCTION {{schema}}.forget_positions() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE {{schema}}.sequences SET position = -1 WHERE lane = NEW.id;
    RETURN NULL;
END $$;

CREATE TRIGGER forget_positions AFTER UPDATE OF stream_id ON {{schema}}.lanes
FOR EACH ROW WHEN (OLD.stream_id IS DISTINCT FROM NEW.stream_id) EXECUTE FUNCTION {{schema}}.forget_positions();

-- What a queue's broker discarded before it was read: the positions from first on, below
-- next. The queue is held until somebody accepts that. Nothing below accepted is recorded
-- again: each worker finds the same gap, and one of them counts it.
CREATE TABLE {{schema}}.gaps (
    lane     integer NOT NULL,
    first    bigint NOT NULL,
    next     bigint NOT NULL,
    accepted bigint NOT NULL DEFAULT 0,
    found_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT gaps_pkey PRIMARY KEY (lane),
    CONSTRAINT gaps_lane_fkey FOREIGN KEY (lane) REFERENCES {{schema}}.lanes (id) ON DELETE CASCADE
);

-- Messages that end the process: out of memory, a crash, a sink that hangs. No error
-- tells of them, so the database must.
--
-- A row is a quarantined lane's message. It is recorded before the sink gets the message,
-- and cleared when that try has an answer. So a row that survives marks a message that
-- ended its worker, or is being tried now. tries counts the former, and the latter as one.
-- worker is a process: what a process that goes on tries again has had its answer.
CREATE TABLE {{schema}}.attempts (
    lane     integer NOT NULL,
    position bigint NOT NULL,
    worker   uuid NOT NULL,
    tries    integer NOT NULL DEFAULT 1,
    first_at timestamptz NOT NULL DEFAULT now(),
    last_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT attempts_pkey PRIMARY KEY (lane, position),
    CONSTRAINT attempts_lane_fkey FOREIGN KEY (lane) REFERENCES {{schema}}.lanes (id) ON DELETE CASCADE
);

-- Messages that weren't applied, kept whole and raw: as bytea, since their very bytes may
-- be what is wrong. People replay or discard them.
--
-- lane_id is the lanes.id that the message was claimed under, and whose books count it. A
-- lane of the same name may be another one by now. stream_id is the lane's; without it, an
-- id that is a position can't be found again.
--
-- attempts counts the tries to apply the message: the one that dead-lettered it, and each
-- failed replay. reason and sqlstate are those of the last one, at last_at.
--
-- created_at is exactly the time of the claim that was made with the dead letter: both are
-- the database's clock in one transaction. That tells its claim from one that the same
-- place made later, after the id was forgotten and the message read again.
CREATE TABLE {{schema}}.dead_letters (
    id                bigint GENERATED ALWAYS AS IDENTITY,
    scope             text NOT NULL,
    source            text NOT NULL,
    lane              text NOT NULL,
    lane_id           integer NOT NULL,
    stream_id         text NOT NULL,
    position          bigint NOT NULL,
    class             text NOT NULL,
    outcome           text NOT NULL, -- the column of the lane's books that counts it
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
    attempts          integer NOT NULL DEFAULT 1,
    created_at        timestamptz NOT NULL DEFAULT {{schema}}.clock(),
    last_at           timestamptz NOT NULL DEFAULT {{schema}}.clock(),
    CONSTRAINT dead_letters_pkey PRIMARY KEY (id)
);
-- A conflict or a duplicate has no claim, and a queue may deliver it again: it becomes a
-- dead letter once. Every other dead letter holds the claim of its id, or of its place. If
-- that claim expired or was forgotten and the place claims again, there is one more dead
-- letter: else the claim would be nobody's, and the message lost. A stream that was made
-- anew has other messages in the same places; stream_id tells them apart.
--
-- The key comes first: claims why asks for it, and it tells rows apart sooner than texts
-- that they all share. The texts compare as bytes, whatever the database's collation: they
-- are never sorted for people, and a locale's order costs more.
CREATE UNIQUE INDEX dead_letters_place ON {{schema}}.dead_letters
    (claim_key, position, class COLLATE "C", lane COLLATE "C", source COLLATE "C", scope COLLATE "C", stream_id COLLATE "C") WHERE class IN ('conflict', 'duplicate');
CREATE INDEX dead_letters_claim_key ON {{schema}}.dead_letters (claim_key);
CREATE INDEX dead_letters_scope_created_at ON {{schema}}.dead_letters (scope, created_at);

-- How old duplicates were, by day: the window is judged by it. up_to_seconds is a bucket's
-- upper bound; the largest number stands for "or older".
CREATE TABLE {{schema}}.duplicate_ages (
    scope         text NOT NULL,
    day           date NOT NULL,
    up_to_seconds bigint NOT NULL,
    duplicates    bigint NOT NULL,
    CONSTRAINT duplicate_ages_pkey PRIMARY KEY (scope, day, up_to_seconds)
);

-- What people did by hand to claims and lanes.
CREATE TABLE {{schema}}.audit (
    id      bigint GENERATED ALWAYS AS IDENTITY,
    at      timestamptz NOT NULL DEFAULT now(),
    scope   text NOT NULL,
    actor   text NOT NULL,
    db_role text NOT NULL DEFAULT current_user,
    action  text NOT NULL,
    subject text NOT NULL,
    detail  jsonb NOT NULL DEFAULT '{}',
    CONSTRAINT audit_pkey PRIMARY KEY (id)
);

-- enter() opens a claim transaction. It waits for a rotation that is under way, keeps the
-- next one out until the transaction ends, and refuses a transaction that was built for
-- another catalog. It must be a statement of its own: the claims that follow need a
-- snapshot taken after the lock. (It is VOLATILE, so that its check sees what was committed
-- while it waited for the lock.)
--
-- It sets time-outs for the transaction and not the session: behind a pooler a session is
-- somebody else's a moment later. synchronous_commit is never lowered; only "off" is
-- raised, because an acknowledged message must survive a crash.
CREATE FUNCTION {{schema}}.enter(p_scope_id integer, p_catalog uuid, p_lock_timeout text, p_statement_timeout text, p_idle_timeout text)
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_sync text := pg_catalog.current_setting('synchronous_commit');
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', p_lock_timeout, true),
            pg_catalog.set_config('statement_timeout', p_statement_timeout, true),
            pg_catalog.set_config('idle_in_transaction_session_timeout', p_idle_timeout, true),
            pg_catalog.set_config('synchronous_commit', CASE v_sync WHEN 'off' THEN 'on' ELSE v_sync END, true),
            pg_catalog.set_config('dedupd.entered', CASE v_sync WHEN 'off' THEN 'on' ELSE v_sync END, true);
    -- One snapshot for the whole transaction would show the catalog from before the wait
    -- for the lock, and the claims of a table sealed since.
    IF pg_catalog.current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'claims need a READ COMMITTED transaction, this one is %', upper(pg_catalog.current_setting('transaction_isolation')) USING ERRCODE = 'DD005';
    END IF;
    PERFORM pg_catalog.pg_advisory_xact_lock_shared({{rotation_lock}}, p_scope_id);
    IF NOT EXISTS (SELECT FROM {{schema}}.scopes WHERE id = p_scope_id AND catalog = p_catalog) THEN
        RAISE EXCEPTION 'the catalog of generations has changed' USING ERRCODE = 'DD002';
    END IF;
END $$;

-- leave() is called before whatever ends a transaction that enter() opened. It refuses any
-- other transaction: a sink that ends the one it was given and begins another would leave
-- effects without claims, or claims without effects. enter()'s mark ends with its
-- transaction.
--
-- A trigger of the sink's table may have lowered synchronous_commit. leave() restores what
-- it was at enter(). What the sink's table deferred was checked in the statement before, so
-- none of it runs later.
CREATE FUNCTION {{schema}}.leave() RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF coalesce(pg_catalog.current_setting('dedupd.entered', true), '') = '' THEN
        RAISE EXCEPTION 'the sink ended the transaction it was given: it must neither commit nor roll back' USING ERRCODE = 'DD003';
    END IF;
    PERFORM pg_catalog.set_config('synchronous_commit', pg_catalog.current_setting('dedupd.entered'), true);
END $$;

-- instance() lets a queue notice a failover of the database. An ordered lane sees by its
-- position that commits are lost; a queue has none.
--
-- It names the database as it is reached now: the start of its server, the database's
-- number, and the number (given) and the file of the table of lanes. A promoted replica and
-- a base backup are other servers, a copy of the database has another number, and a
-- restored dump another table. So everything that was committed in an instance is there.
-- A restart loses nothing, but makes another instance too.
CREATE FUNCTION {{schema}}.instance(p_lanes oid) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT pg_catalog.concat_ws('/', extract(epoch FROM pg_catalog.pg_postmaster_start_time()),
        (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()), p_lanes, pg_catalog.pg_relation_filenode(p_lanes))
$$;

-- acquire_lane() and acquire_queue() make a worker the owner of a lane's row, or make the
-- row. r_how is acquired, made or stale. Stale: a worker of a newer group generation owns
-- the lane and was at work within p_grace; nothing was changed. Nothing is returned if
-- there is no row and p_start doesn't say where the lane begins.
--
-- An existing row is locked, not inserted over: ON CONFLICT DO UPDATE would draw a number
-- from lanes.id each time, and numbers run out. A lost race for a new lane costs one.
--
-- The stream id combines the log and the row. A row that was forgotten may have read a log
-- of the same id that has lost a part since; what is known by its position isn't mistaken
-- for what was there then.
--
-- An epoch is the database's clock in microseconds, or one more than the last if that is
-- larger. It only rises, and one that was lost with a failover isn't given out again, so
-- that a worker from before can't pass for a new owner.
CREATE FUNCTION {{schema}}.acquire_lane(p_scope text, p_source text, p_lane text, p_log_id text, p_partitions integer, p_group_generation bigint, p_owner text, p_grace interval, p_start bigint)
RETURNS TABLE (r_how text, r_lane {{schema}}.lanes) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_epoch bigint := (extract(epoch FROM clock_timestamp()) * 1e6)::bigint;
    v_stream_id text := concat(p_log_id, '/', gen_random_uuid());
BEGIN
    LOOP
        SELECT * INTO r_lane FROM {{schema}}.lanes WHERE scope = p_scope AND source = p_source AND lane = p_lane FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        IF p_start < 0 THEN
            RETURN;
        END IF;
        INSERT INTO {{schema}}.lanes (scope, source, lane, ordered, stream_id, log_id, epoch, group_generation, owner, acquisitions, start_position, next_position, partitions)
        VALUES (p_scope, p_source, p_lane, true, v_stream_id, p_log_id, v_epoch, p_group_generation, p_owner, 1, p_start, p_start, p_partitions)
        ON CONFLICT (scope, source, lane) DO NOTHING
        RETURNING * INTO r_lane;
        IF FOUND THEN
            r_how := 'made';
            RETURN NEXT;
            RETURN;
        END IF;
        -- Another worker has just made the row: the next SELECT sees it.
    END LOOP;
    r_how := 'stale';
    IF r_lane.group_generation <= p_group_generation OR greatest(r_lane.updated_at, r_lane.acquired_at) < now() - p_grace THEN
        r_how := 'acquired';
        -- A position that an operator has set is one of the log that is there now. It
        -- settles a cut.
        UPDATE {{schema}}.lanes SET
            epoch            = greatest(epoch + 1, v_epoch),
            owner            = p_owner,
            acquired_at      = now(),
            acquisitions     = acquisitions + 1,
            group_generation = p_group_generation,
            partitions       = coalesce(partitions, p_partitions),
            stream_id        = CASE WHEN repositioned AND cut_at IS NOT NULL THEN v_stream_id WHEN repositioned AND log_id <> p_log_id THEN p_log_id || '/' || right(stream_id, 36) ELSE stream_id END,
            log_id           = CASE WHEN repositioned OR log_id IS NULL THEN coalesce(p_log_id, log_id) ELSE log_id END,
            start_position   = CASE WHEN repositioned AND log_id <> coalesce(p_log_id, '') THEN next_position ELSE start_position END,
            cut_at           = CASE WHEN NOT repositioned THEN cut_at END,
            repositioned     = false
        WHERE id = r_lane.id RETURNING * INTO r_lane;
    END IF;
    RETURN NEXT;
END $$;

-- A queue's epoch only names its row: any number of workers share it. Its positions begin
-- again with another log. All workers of one log have the same stream id, whatever others
-- have acquired in between.
CREATE FUNCTION {{schema}}.acquire_queue(p_scope text, p_source text, p_lane text, p_log_id text, p_owner text, p_start bigint)
RETURNS TABLE (r_how text, r_lane {{schema}}.lanes, r_instance text) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_same_log boolean;
BEGIN
    LOOP
        SELECT * INTO r_lane FROM {{schema}}.lanes WHERE scope = p_scope AND source = p_source AND lane = p_lane FOR NO KEY UPDATE;
        IF FOUND THEN
            r_how := 'acquired';
            v_same_log := coalesce(r_lane.log_id = p_log_id, true);
            UPDATE {{schema}}.lanes SET
                owner           = p_owner,
                acquired_at     = now(),
                stream_id       = CASE WHEN v_same_log THEN stream_id ELSE p_log_id || '/' || right(stream_id, 36) END,
                log_id          = coalesce(p_log_id, log_id),
                start_position  = CASE WHEN v_same_log THEN start_position END,
                next_position   = CASE WHEN v_same_log THEN next_position ELSE 0 END,
                broker_position = CASE WHEN v_same_log THEN broker_position END,
                cut_at          = CASE WHEN v_same_log THEN cut_at END
            WHERE id = r_lane.id RETURNING * INTO r_lane;
            EXIT;
        END IF;
        IF p_start < 0 THEN
            RETURN;
        END IF;
        INSERT INTO {{schema}}.lanes (scope, source, lane, ordered, stream_id, log_id, epoch, group_generation, owner, next_position)
        VALUES (p_scope, p_source, p_lane, false, concat(p_log_id, '/', gen_random_uuid()), p_log_id, (extract(epoch FROM clock_timestamp()) * 1e6)::bigint, 0, p_owner, p_start)
        ON CONFLICT (scope, source, lane) DO NOTHING
        RETURNING * INTO r_lane;
        IF FOUND THEN
            r_how := 'made';
            EXIT;
        END IF;
    END LOOP;
    SELECT {{schema}}.instance(tableoid) INTO r_instance FROM {{schema}}.lanes WHERE id = r_lane.id;
    RETURN NEXT;
END $$;

-- advance() moves one lane and books what became of its messages. It raises an error if
-- another worker owns the lane or the lane isn't where the batch starts. So COMMIT can be
-- sent behind it without waiting for its answer: an update of no rows is no error, and a
-- fenced worker's writes would be committed.
--
-- A lane without order (p_from is NULL) has no position to compare; its epoch only says
-- that it is still the same row. It moves only in the instance of the database that it was
-- acquired in, and not if the row's checkpoint is below its worker's.
--
-- acquisitions begins again: a lane that moves is past what may have ended a process.
CREATE FUNCTION {{schema}}.advance(
    p_lane integer, p_epoch bigint, p_from bigint, p_checkpoint bigint, p_instance text, p_next bigint, p_broker_position bigint, p_stream_time timestamptz, p_lag bigint,
    p_written bigint, p_already_present bigint, p_stale bigint, p_rejected bigint, p_redelivered bigint, p_resent bigint, p_cross_source bigint, p_conflicts bigint, p_dead bigint, p_filtered bigint,
    p_leader_epochs bigint[])
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM {{schema}}.leave();
    UPDATE {{schema}}.lanes SET
        next_position   = CASE WHEN p_from IS NULL THEN greatest(next_position, p_next) ELSE p_next END,
        -- A batch may know an older broker-confirmed position than the row. Whoever lowers
        -- an ordered lane's also raises its epoch or moves it, which fences such a batch. A
        -- queue keeps its epoch when its durable or its stream is made anew, so its
        -- position follows the durable down: too low has messages delivered again, and too
        -- high would let a durable begin above what wasn't read.
        broker_position = CASE WHEN p_from IS NULL THEN coalesce(p_broker_position, broker_position) ELSE greatest(broker_position, p_broker_position) END,
        -- Producers may set timestamps; the database's clock bounds them. A batch without
        -- any, such as one over a hole in the log, says nothing about the time (least() of
        -- NULL and the clock would be the clock). If a lane's clock is ahead of the
        -- database's by more than transactions overlap, the database's went back since: it
        -- was wrong then or is now, and the lane's clock begins anew.
        stream_time     = CASE WHEN p_stream_time IS NULL THEN stream_time
            ELSE greatest(CASE WHEN stream_time < {{schema}}.clock() + interval '1 minute' THEN stream_time END, least(p_stream_time, {{schema}}.clock())) END,
        lag             = coalesce(p_lag, lag),
        fetched         = fetched + p_written + p_already_present + p_stale + p_rejected + p_redelivered + p_resent + p_cross_source + p_conflicts + p_dead + p_filtered,
        written         = written + p_written,
        already_present = already_present + p_already_present,
        stale           = stale + p_stale,
        rejected        = rejected + p_rejected,
        redelivered     = redelivered + p_redelivered,
        resent          = resent + p_resent,
        cross_source    = cross_source + p_cross_source,
        conflicts       = conflicts + p_conflicts,
        dead            = dead + p_dead,
        filtered        = filtered + p_filtered,
        updated_at      = now(),
        acquisitions    = 0,
        leader_epochs   = p_leader_epochs
    WHERE id = p_lane AND epoch = p_epoch
      AND CASE WHEN p_from IS NULL THEN checkpoint >= p_checkpoint AND {{schema}}.instance(tableoid) = p_instance ELSE next_position = p_from END;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'lane % is fenced', p_lane USING ERRCODE = 'DD001';
    END IF;
END $$;

-- at() refuses a transaction whose lanes aren't where its batches begin, before anything is
-- decided by that. It is asked once the producers' marks are locked: a commit whose answer
-- was lost has ended by then.
CREATE FUNCTION {{schema}}.at(p_lanes integer[], p_epochs bigint[], p_from bigint[]) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF EXISTS (SELECT FROM unnest(p_lanes, p_epochs, p_from) AS u (lane, epoch, "from")
               WHERE NOT EXISTS (SELECT FROM {{schema}}.lanes l WHERE l.id = u.lane AND l.epoch = u.epoch AND l.next_position = u."from")) THEN
        RAISE EXCEPTION 'a lane is fenced' USING ERRCODE = 'DD001';
    END IF;
END $$;

-- mark() moves producers' marks, which the transaction has locked. One with a name is new;
-- if it isn't new any more, another worker has it from another lane, and the transaction is
-- tried again with what that wrote.
CREATE FUNCTION {{schema}}.mark(p_scope_id integer, p_producers uuid[], p_names bytea[], p_lanes integer[], p_epochs bigint[], p_numbers bigint[], p_positions bigint[])
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_moved bigint;
BEGIN
    INSERT INTO {{schema}}.sequences AS s (scope_id, producer, name, lane, epoch, number, position)
    SELECT p_scope_id, u.producer, coalesce(u.name, ''), u.lane, u.epoch, u.number, u.position
    FROM unnest(p_producers, p_names, p_lanes, p_epochs, p_numbers, p_positions) AS u (producer, name, lane, epoch, number, position)
    ON CONFLICT (scope_id, producer) DO UPDATE SET lane = EXCLUDED.lane, epoch = EXCLUDED.epoch, number = EXCLUDED.number, position = EXCLUDED.position, seen_at = {{schema}}.clock()
    WHERE EXCLUDED.name = '';
    GET DIAGNOSTICS v_moved = ROW_COUNT;
    IF v_moved <> cardinality(p_producers) THEN
        RAISE EXCEPTION 'another worker has moved a producer''s mark meanwhile' USING ERRCODE = '40001';
    END IF;
END $$;

-- hold_claim() reads a claim and keeps it from being forgotten until the transaction ends,
-- so that what is decided by it stays right. enter() must have opened the transaction: then
-- the generation is the one that the caller means. It has its owner's rights, since locking
-- a row needs the right to update.
CREATE FUNCTION {{schema}}.hold_claim(p_generation uuid, p_key uuid, OUT r_position bigint, OUT r_claimed_at timestamptz)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_table text;
BEGIN
    SELECT table_name INTO v_table FROM {{schema}}.generations WHERE identity = p_generation;
    EXECUTE format('SELECT position, claimed_at FROM {{schema}}.%I WHERE key = $1 FOR KEY SHARE', v_table) INTO r_position, r_claimed_at USING p_key;
    IF r_claimed_at IS NULL THEN
        RAISE EXCEPTION 'a claim vanished while it was looked at' USING ERRCODE = '40001';
    END IF;
END $$;

-- keep_results() keeps results with their claims, which the transaction has made or holds:
-- enter() must have opened it. It returns how many it has kept. With p_xmin it keeps only
-- what that part of transaction p_claimed_in has claimed, and only in that transaction: if the
-- part was rolled back, the claim may be somebody else's by now; and once the transaction has
-- committed, duplicates may have been told that there is no result. What a key has already is
-- left of a claim that was deleted by hand, or of an earlier call. It has its owner's rights,
-- so that a worker's role needs none on each of the tables.
CREATE FUNCTION {{schema}}.keep_results(p_generation uuid, p_keys uuid[], p_sizes integer[], p_results bytea[], p_xmin xid, p_claimed_in xid8) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_claims text;
    v_kept bigint;
BEGIN
    SELECT table_name INTO v_claims FROM {{schema}}.generations WHERE identity = p_generation;
    IF NOT FOUND OR p_claimed_in <> pg_current_xact_id() THEN
        RETURN 0;
    END IF;
    EXECUTE format('INSERT INTO {{schema}}.%I (key, size, result) SELECT u.key, u.size, u.result FROM unnest($1, $2, $3) AS u (key, size, result)
        WHERE $4 IS NULL OR EXISTS (SELECT FROM {{schema}}.%I c WHERE c.key = u.key AND c.xmin = $4)
        ON CONFLICT (key) DO UPDATE SET size = EXCLUDED.size, result = EXCLUDED.result', 'results' || substr(v_claims, 7), v_claims)
    USING p_keys, p_sizes, p_results, p_xmin;
    GET DIAGNOSTICS v_kept = ROW_COUNT;
    RETURN v_kept;
END $$;

-- replayed() ends the replay of a dead letter: it deletes it in the transaction that
-- applies it, or that finds its id applied already. The books of its lane counted it as a
-- dead letter, a conflict or a duplicate, and now count what it has become; fetched stays.
-- If the lane is gone, or its books aren't those that counted it, nothing changes. The lane
-- doesn't move. updated_at tells whether its owner is at work, so it stays.
CREATE FUNCTION {{schema}}.replayed(p_dead_letter bigint, p_lane integer, p_outcome text) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_dead_letter {{schema}}.dead_letters%ROWTYPE;
    v_was text;
BEGIN
    PERFORM {{schema}}.leave();
    DELETE FROM {{schema}}.dead_letters WHERE id = p_dead_letter RETURNING * INTO v_dead_letter;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the dead letter % went while it was replayed', p_dead_letter USING ERRCODE = '40001';
    END IF;
    v_was := v_dead_letter.outcome;
    UPDATE {{schema}}.lanes SET
        written         = written + (p_outcome = 'written')::integer,
        already_present = already_present + (p_outcome = 'already_present')::integer,
        stale           = stale + (p_outcome = 'stale')::integer,
        rejected        = rejected + (p_outcome = 'rejected')::integer,
        redelivered     = redelivered + (p_outcome = 'redelivered')::integer,
        resent          = resent + (p_outcome = 'resent')::integer - (v_was = 'resent')::integer,
        cross_source    = cross_source + (p_outcome = 'cross_source')::integer - (v_was = 'cross_source')::integer,
        conflicts       = conflicts - (v_was = 'conflicts')::integer,
        dead            = dead - (v_was = 'dead')::integer
    WHERE id = p_lane AND CASE v_was WHEN 'conflicts' THEN conflicts WHEN 'resent' THEN resent WHEN 'cross_source' THEN cross_source ELSE dead END > 0;
END $$;

-- note_dead_letter() records in the audit what somebody did to a dead letter. A worker's
-- role may write no other lines there, and so nothing about claims and lanes.
CREATE FUNCTION {{schema}}.note_dead_letter(p_scope text, p_actor text, p_action text, p_dead_letter bigint, p_detail text) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO {{schema}}.audit (scope, actor, db_role, action, subject, detail)
    VALUES (p_scope, p_actor, session_user, 'dlq ' || p_action, 'dead letter ' || p_dead_letter, p_detail::jsonb)
$$;

-- stream_clock() is how far the scope's stream has come: the clock of the lane that is
-- furthest behind. A lane without a clock may have any backlog. A scope without lanes has
-- the database's time.
CREATE FUNCTION {{schema}}.stream_clock(p_scope text) RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT least({{schema}}.clock(), (SELECT min(CASE WHEN stream_time < {{schema}}.clock() + interval '1 minute' THEN stream_time ELSE '-infinity' END) FROM {{schema}}.lanes WHERE scope = p_scope))
$$;

-- The functions below make, seal and drop tables with their owner's rights, so that a
-- worker's role needs none. Only the holder of the retention lock calls them.

-- prepare_generation() makes the table that the next rotation opens, and one for its
-- results. They are made ahead of time, since that takes far longer than a rotation may hold
-- everybody up. One that was lost meanwhile held nothing, and is made again. So is any
-- generation's lost table of results: its claims still hold.
CREATE FUNCTION {{schema}}.prepare_generation(p_scope text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_number integer;
    v_table text;
    v_made text[] := '{}';
    v_grant text;
BEGIN
    IF NOT EXISTS (SELECT FROM {{schema}}.scopes WHERE scope = p_scope) THEN
        RAISE EXCEPTION 'there is no scope %', p_scope;
    END IF;
    DELETE FROM {{schema}}.generations WHERE scope = p_scope AND state = 'next'
      AND NOT EXISTS (SELECT FROM pg_class WHERE relname = table_name AND relnamespace = $s${{schema}}$s$::regnamespace);
    IF NOT EXISTS (SELECT FROM {{schema}}.generations WHERE scope = p_scope AND state = 'next') THEN
        -- Above every number in the catalog, and above every existing table: one that the
        -- catalog doesn't have may hold anything.
        SELECT 1 + greatest(0,
            (SELECT max(generation) FROM {{schema}}.generations WHERE scope = p_scope),
            (SELECT max(substring(relname FROM '_([0-9]{1,9})$')::integer) FROM pg_class
             WHERE relnamespace = $s${{schema}}$s$::regnamespace AND relname ~ ('^claims_' || p_scope || '_[0-9]{1,9}$')))
        INTO v_number;
        v_table := format('claims_%s_%s', p_scope, v_number);
        -- Results without claims are nobody's.
        EXECUTE format('DROP TABLE IF EXISTS {{schema}}.%I', 'results' || substr(v_table, 7));
        -- A plan made while a table is small reads all of it, and is kept while the table
        -- grows. Without statistics the planner takes the index, so there are none until
        -- the table is large.
        EXECUTE format('CREATE TABLE {{schema}}.%I (PRIMARY KEY (key)) INHERITS ({{schema}}.claims_root)
            WITH (autovacuum_analyze_threshold = 100000, autovacuum_vacuum_insert_threshold = 100000)', v_table);
        INSERT INTO {{schema}}.generations (scope, generation, table_name, state, opened_at)
        VALUES (p_scope, v_number, v_table, 'next', {{schema}}.clock());
        v_made := ARRAY[v_table];
    END IF;
    FOR v_table IN
        SELECT 'results' || substr(table_name, 7) FROM {{schema}}.generations WHERE scope = p_scope AND state <> 'dropping'
          AND EXISTS (SELECT FROM pg_class WHERE relname = table_name AND relnamespace = $s${{schema}}$s$::regnamespace)
          AND NOT EXISTS (SELECT FROM pg_class WHERE relname = 'results' || substr(table_name, 7) AND relnamespace = $s${{schema}}$s$::regnamespace)
    LOOP
        EXECUTE format('CREATE TABLE {{schema}}.%I (PRIMARY KEY (key)) INHERITS ({{schema}}.results_root)
            WITH (autovacuum_analyze_threshold = 100000, autovacuum_vacuum_insert_threshold = 100000)', v_table);
        v_made := v_made || v_table;
    END LOOP;
    -- Whoever may claim may claim here too. Default privileges would only hold for tables
    -- of the role that set them.
    FOR v_grant IN
        SELECT format('GRANT %s ON {{schema}}.%I TO %s', privilege_type, made, CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE grantee::regrole::text END)
        FROM unnest(v_made) AS made, pg_class, aclexplode(relacl)
        WHERE relnamespace = $s${{schema}}$s$::regnamespace AND relname = split_part(made, '_', 1) || '_root' AND grantee <> relowner
    LOOP
        EXECUTE v_grant;
    END LOOP;
END $$;

-- rotate() seals the open generation and opens the next. Claim transactions hold the
-- rotation lock shared, so once we hold it, every claim in the open table is committed and
-- visible, and none is under way. While we wait, all later claims wait too, so the wait
-- must be short; 55P03 means to try again. A client that freezes before its COMMIT loses
-- the lock after a second.
--
-- It returns false if the open generation isn't the one meant, if none is prepared, or if
-- the prepared one has lost its table.
CREATE FUNCTION {{schema}}.rotate(p_scope text, p_open uuid, p_lock_timeout text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_table text;
    v_first uuid;
    v_last uuid;
    v_now timestamptz;
BEGIN
    PERFORM set_config('lock_timeout', p_lock_timeout, true), set_config('idle_in_transaction_session_timeout', '1s', true);
    PERFORM pg_advisory_xact_lock({{rotation_lock}}, (SELECT id FROM {{schema}}.scopes WHERE scope = p_scope));
    SELECT table_name INTO v_table FROM {{schema}}.generations WHERE scope = p_scope AND state = 'open' AND identity = p_open;
    IF NOT FOUND OR NOT EXISTS (
        SELECT FROM {{schema}}.generations JOIN pg_class ON relname = table_name AND relnamespace = $s${{schema}}$s$::regnamespace
        WHERE scope = p_scope AND state = 'next') THEN
        RETURN false;
    END IF;
    EXECUTE format('SELECT (SELECT key FROM {{schema}}.%1$I ORDER BY key LIMIT 1), (SELECT key FROM {{schema}}.%1$I ORDER BY key DESC LIMIT 1)', v_table)
    INTO v_first, v_last;
    -- The transaction's own time is from before the wait for the lock. If the clock shows a
    -- time before this generation was opened, it was ahead then or is behind now. Claims
    -- with too early a seal would expire too early.
    SELECT greatest(opened_at, {{schema}}.clock() + (clock_timestamp() - now())) INTO v_now FROM {{schema}}.generations WHERE scope = p_scope AND state = 'open';
    UPDATE {{schema}}.generations SET state = 'sealed', identity = gen_random_uuid(), sealed_at = v_now, first_key = v_first, last_key = v_last
    WHERE scope = p_scope AND state = 'open';
    UPDATE {{schema}}.generations SET state = 'open', opened_at = v_now WHERE scope = p_scope AND state = 'next';
    UPDATE {{schema}}.scopes SET catalog_epoch = catalog_epoch + 1, catalog = gen_random_uuid() WHERE scope = p_scope;
    RETURN true;
END $$;

-- expire() takes generations out of the catalog: those that every lane's clock has passed by
-- the window, and those that were held for p_max_hold. It returns how many. Their tables
-- are dropped later, when no transaction knows them any more.
CREATE FUNCTION {{schema}}.expire(p_scope text, p_window interval, p_max_hold interval, p_lock_timeout text) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count integer;
BEGIN
    PERFORM set_config('lock_timeout', p_lock_timeout, true), set_config('idle_in_transaction_session_timeout', '1s', true);
    PERFORM pg_advisory_xact_lock({{rotation_lock}}, (SELECT id FROM {{schema}}.scopes WHERE scope = p_scope));
    UPDATE {{schema}}.generations SET state = 'dropping'
    WHERE scope = p_scope AND state = 'sealed'
      AND (sealed_at + p_window < {{schema}}.stream_clock(p_scope) OR sealed_at + p_max_hold < {{schema}}.clock());
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count > 0 THEN
        UPDATE {{schema}}.scopes SET catalog_epoch = catalog_epoch + 1, catalog = gen_random_uuid() WHERE scope = p_scope;
    END IF;
    RETURN v_count;
END $$;

-- drop_generation() drops the tables of an expired generation, and everything kept about it.
-- If the table has a long reader, such as a backup, the wait for its lock fails soon
-- (55P03): a longer one would make others wait too.
CREATE FUNCTION {{schema}}.drop_generation(p_scope text, p_generation integer, p_lock_timeout text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_table text;
    v_identity uuid;
BEGIN
    PERFORM set_config('lock_timeout', p_lock_timeout, true);
    DELETE FROM {{schema}}.generations WHERE scope = p_scope AND generation = p_generation AND state = 'dropping'
    RETURNING table_name, identity INTO v_table, v_identity;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    EXECUTE format('DROP TABLE IF EXISTS {{schema}}.%I, {{schema}}.%I', v_table, 'results' || substr(v_table, 7));
    DELETE FROM {{schema}}.filters WHERE identity = v_identity;
END $$;

-- sweep() drops tables of claims and of results that the catalog doesn't have, and filters
-- of generations that are gone. It returns the tables' names. A crash leaves none of them
-- behind, since every step is one transaction; a person may, or a partial restore. It does
-- nothing while there is no open generation: then a restore is under way, which puts tables
-- back before the rows about them.
CREATE FUNCTION {{schema}}.sweep(p_scope text, p_lock_timeout text) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_infix text := '_' || p_scope || '_';
    v_table text;
BEGIN
    IF NOT EXISTS (SELECT FROM {{schema}}.generations WHERE scope = p_scope AND state = 'open') THEN
        RETURN;
    END IF;
    PERFORM set_config('lock_timeout', p_lock_timeout, true);
    FOR v_table IN
        SELECT relname FROM pg_class
        WHERE relnamespace = $s${{schema}}$s$::regnamespace AND relkind = 'r'
          AND split_part(relname, '_', 1) IN ('claims', 'results')
          AND starts_with(substr(relname, strpos(relname, '_')), v_infix) AND substr(relname, strpos(relname, '_') + length(v_infix)) ~ '^[0-9]{1,9}$'
          AND NOT EXISTS (SELECT FROM {{schema}}.generations WHERE relname IN (table_name, 'results' || substr(table_name, 7)))
    LOOP
        EXECUTE format('DROP TABLE {{schema}}.%I', v_table);
        RETURN NEXT v_table;
    END LOOP;
    DELETE FROM {{schema}}.filters f WHERE NOT EXISTS (SELECT FROM {{schema}}.generations g WHERE g.identity = f.identity);
END $$;

-- For people with psql.
CREATE VIEW {{schema}}.books AS
SELECT scope, source, lane, fetched, applied, written, already_present, stale, rejected,
       redelivered + resent + cross_source AS duplicates,
       redelivered, resent, cross_source, conflicts, dead, filtered,
       next_position, lag, stream_time, owner, updated_at
FROM {{schema}}.lanes;

CREATE VIEW {{schema}}.claims AS
SELECT g.scope, g.generation, c.key, c.fingerprint, l.source, l.lane, c.position, c.claimed_at
FROM {{schema}}.claims_root c
JOIN pg_catalog.pg_class t ON t.oid = c.tableoid
JOIN {{schema}}.generations g ON g.table_name = t.relname
LEFT JOIN {{schema}}.lanes l ON l.id = c.lane;

-- Who may call a function is granted by name (GrantSQL): a database's default privileges
-- may give everybody the right, or nobody.
REVOKE ALL ON FUNCTION {{schema}}.clock(), {{schema}}.enter(integer, uuid, text, text, text), {{schema}}.leave(),
    {{schema}}.instance(oid), {{schema}}.stream_clock(text),
    {{schema}}.acquire_lane(text, text, text, text, integer, bigint, text, interval, bigint), {{schema}}.acquire_queue(text, text, text, text, text, bigint),
    {{schema}}.advance(integer, bigint, bigint, bigint, text, bigint, bigint, timestamptz, bigint, bigint, bigint, bigint, bigint, bigint, bigint, bigint, bigint, bigint, bigint, bigint[]),
    {{schema}}.at(integer[], bigint[], bigint[]), {{schema}}.mark(integer, uuid[], bytea[], integer[], bigint[], bigint[], bigint[]), {{schema}}.hold_claim(uuid, uuid), {{schema}}.keep_results(uuid, uuid[], integer[], bytea[], xid, xid8), {{schema}}.replayed(bigint, integer, text), {{schema}}.note_dead_letter(text, text, text, bigint, text),
    {{schema}}.prepare_generation(text), {{schema}}.rotate(text, uuid, text), {{schema}}.expire(text, interval, interval, text),
    {{schema}}.drop_generation(text, integer, text), {{schema}}.sweep(text, text)
FROM PUBLIC;
-- Whoever may read the tables may also read the clocks, and look for a claim while no
-- generation changes.
GRANT EXECUTE ON FUNCTION {{schema}}.clock(), {{schema}}.stream_clock(text), {{schema}}.enter(integer, uuid, text, text, text) TO PUBLIC;
