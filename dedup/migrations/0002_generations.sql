-- Generations that are sealed, looked up through filters, and dropped whole.

-- The database's clock, as everything about retention reads it: no worker's clock
-- decides anything about claims. It is a function so that a test can move it.
CREATE FUNCTION {{schema}}.clock() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT pg_catalog.now()';

-- catalog is random and new with every change of the scope's generations. A claim
-- transaction names the catalog it was built for. A counter could not tell one
-- history from another: after a failover or a restore that lost a rotation, the
-- same number comes again with other tables behind it.
ALTER TABLE {{schema}}.scopes ADD COLUMN catalog uuid NOT NULL DEFAULT gen_random_uuid();

-- next: made ahead of time, empty; open: takes claims; sealed: never written
-- again; dropping: out of the catalog, its table still to be dropped.
--
-- The identity is renewed when a generation is sealed: whatever was learnt from
-- the sealed table (a filter) belongs to this seal and no other. A database that
-- lost the seal may seal the same table again with other claims in it.
--
-- first_key and last_key (the zone map) are NULL for a generation that was empty
-- when it was sealed.
ALTER TABLE {{schema}}.generations
    DROP CONSTRAINT generations_state_check,
    ADD CONSTRAINT generations_state_check CHECK (state IN ('next', 'open', 'sealed', 'dropping')),
    ADD CONSTRAINT generations_identity_key UNIQUE (identity),
    ADD COLUMN sealed_at timestamptz,
    ADD COLUMN first_key uuid,
    ADD COLUMN last_key uuid,
    ADD CONSTRAINT generations_sealed_check CHECK ((sealed_at IS NOT NULL) = (state IN ('sealed', 'dropping')));
CREATE UNIQUE INDEX generations_one_next ON {{schema}}.generations (scope) WHERE state = 'next';

ALTER TABLE {{schema}}.claims_root ALTER COLUMN claimed_at SET DEFAULT {{schema}}.clock();

-- The filters of sealed generations, in chunks: chunk n covers the keys above
-- chunk n-1's last_key, up to its own. last marks the one that ends the
-- generation. The checksum covers everything else in the row.
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

-- How old duplicates were, by day: what the window is judged by. up_to_seconds is
-- the upper bound of a bucket; the largest number stands for "or older".
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

-- enter() as before, by the catalog's identity.
CREATE FUNCTION {{schema}}.enter(p_scope_id integer, p_catalog uuid, p_lock_timeout text, p_statement_timeout text, p_idle_timeout text)
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_catalog.set_config('lock_timeout', p_lock_timeout, true),
            pg_catalog.set_config('statement_timeout', p_statement_timeout, true),
            pg_catalog.set_config('idle_in_transaction_session_timeout', p_idle_timeout, true),
            pg_catalog.set_config('dedupd.entered', 'yes', true);
    IF pg_catalog.current_setting('synchronous_commit') = 'off' THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    -- One snapshot for the whole transaction would show the catalog as it was
    -- before the lock was waited for, and the claims of a table sealed since.
    IF pg_catalog.current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'claims need a READ COMMITTED transaction, this one is %', upper(pg_catalog.current_setting('transaction_isolation')) USING ERRCODE = 'DD005';
    END IF;
    PERFORM pg_catalog.pg_advisory_xact_lock_shared({{rotation_lock}}, p_scope_id);
    IF NOT EXISTS (SELECT FROM {{schema}}.scopes WHERE id = p_scope_id AND catalog = p_catalog) THEN
        RAISE EXCEPTION 'the catalog of generations has changed' USING ERRCODE = 'DD002';
    END IF;
END $$;

-- A worker of the version before knows one generation only: after a rotation it
-- would take every sealed claim for new. It must not go on beside this one.
CREATE OR REPLACE FUNCTION {{schema}}.enter(p_scope_id integer, p_catalog_epoch bigint, p_lock_timeout text, p_statement_timeout text, p_idle_timeout text)
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RAISE EXCEPTION 'the database''s schema was upgraded to version 2, which this dedupd does not know: run the newer one' USING ERRCODE = 'DD004';
END $$;

CREATE OR REPLACE FUNCTION {{schema}}.advance(
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
        -- Producers may set timestamps; the database's clock bounds them. A batch
        -- without any, such as one over a hole in the log, tells nothing of the time
        -- (and least() of NULL and the clock is the clock).
        stream_time     = CASE WHEN p_stream_time IS NULL THEN stream_time ELSE greatest(stream_time, least(p_stream_time, {{schema}}.clock())) END,
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

-- How far the scope's stream has come: the clock of the lane that is furthest
-- behind. A lane of which nothing is known yet may have any backlog. A scope
-- without lanes has the database's time.
CREATE FUNCTION {{schema}}.stream_clock(p_scope text) RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT least({{schema}}.clock(), (SELECT min(coalesce(stream_time, '-infinity')) FROM {{schema}}.lanes WHERE scope = p_scope))
$$;

-- The functions below make, seal and drop tables with their owner's rights, so
-- that a worker's role needs none. They are for whoever holds the retention lock.

-- prepare_generation() makes the table that the next rotation opens, ahead of
-- time: making a table takes far longer than a rotation may hold everybody up.
-- One that was lost meanwhile held nothing, and is made again.
CREATE FUNCTION {{schema}}.prepare_generation(p_scope text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_number integer;
    v_table text;
    v_grant text;
BEGIN
    IF NOT EXISTS (SELECT FROM {{schema}}.scopes WHERE scope = p_scope) THEN
        RAISE EXCEPTION 'there is no scope %', p_scope;
    END IF;
    DELETE FROM {{schema}}.generations WHERE scope = p_scope AND state = 'next'
      AND NOT EXISTS (SELECT FROM pg_class WHERE relname = table_name AND relnamespace = $s${{schema}}$s$::regnamespace);
    IF EXISTS (SELECT FROM {{schema}}.generations WHERE scope = p_scope AND state = 'next') THEN
        RETURN;
    END IF;
    -- Above every number in the catalog, and above every table there is: one that
    -- the catalog doesn't know may hold anything.
    SELECT 1 + greatest(
        (SELECT max(generation) FROM {{schema}}.generations WHERE scope = p_scope),
        (SELECT max(substring(relname FROM '_([0-9]{1,9})$')::integer) FROM pg_class
         WHERE relnamespace = $s${{schema}}$s$::regnamespace AND relname ~ ('^claims_' || p_scope || '_[0-9]{1,9}$')))
    INTO v_number;
    v_table := format('claims_%s_%s', p_scope, v_number);
    -- A plan made while a table is small reads all of it, and is kept while the
    -- table grows. Without statistics the planner takes the index, so there are
    -- none until the table is large.
    EXECUTE format('CREATE TABLE {{schema}}.%I (PRIMARY KEY (key)) INHERITS ({{schema}}.claims_root)
        WITH (autovacuum_analyze_threshold = 100000, autovacuum_vacuum_insert_threshold = 100000)', v_table);
    -- Whoever may claim may claim here, too; default privileges would only count
    -- for tables of the role that set them.
    FOR v_grant IN
        SELECT format('GRANT %s ON {{schema}}.%I TO %s', privilege_type, v_table, CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE grantee::regrole::text END)
        FROM pg_class, aclexplode(relacl) WHERE oid = $s${{schema}}.claims_root$s$::regclass AND grantee <> relowner
    LOOP
        EXECUTE v_grant;
    END LOOP;
    INSERT INTO {{schema}}.generations (scope, generation, table_name, state, opened_at)
    VALUES (p_scope, v_number, v_table, 'next', {{schema}}.clock());
END $$;

-- rotate() seals the open generation and opens the next. Claim transactions hold
-- the rotation lock shared: once it is ours, every claim in the open table is
-- committed and visible, and none is under way. A request that waits holds up all
-- later claims, so the wait must be short; 55P03 means to try again. Nor may a
-- client that freezes before its COMMIT keep the lock: it has a second for it.
--
-- False: the open generation isn't the one meant, or none is prepared, or the
-- prepared one has lost its table.
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
    -- The transaction's own time is from before the lock was waited for.
    v_now := {{schema}}.clock() + (clock_timestamp() - now());
    UPDATE {{schema}}.generations SET state = 'sealed', identity = gen_random_uuid(), sealed_at = v_now, first_key = v_first, last_key = v_last
    WHERE scope = p_scope AND state = 'open';
    UPDATE {{schema}}.generations SET state = 'open', opened_at = v_now WHERE scope = p_scope AND state = 'next';
    UPDATE {{schema}}.scopes SET catalog_epoch = catalog_epoch + 1, catalog = gen_random_uuid() WHERE scope = p_scope;
    RETURN true;
END $$;

-- expire() takes generations out of the catalog whose claims nobody needs any
-- more: every lane's clock has passed their end by the window, or they have been
-- held for so long that no lane may hold them longer. It tells how many. Their
-- tables are dropped later, when no transaction knows of them.
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

-- drop_generation() drops the table of a generation that expired, with all that
-- is kept about it. A long reader of the table, such as a backup, makes the wait
-- for its lock fail soon (55P03): who waited longer would make others wait, too.
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
    EXECUTE format('DROP TABLE IF EXISTS {{schema}}.%I', v_table);
    DELETE FROM {{schema}}.filters WHERE identity = v_identity;
END $$;

-- sweep() drops tables of claims that the catalog doesn't know, and filters of
-- generations that are gone, and names what it dropped. Neither can come of a
-- crash, for every step is one transaction; but of a hand, or of a restore of a
-- part. A catalog without an open generation is no catalog: a restore is under
-- way, which puts the tables back before the rows that tell of them.
CREATE FUNCTION {{schema}}.sweep(p_scope text, p_lock_timeout text) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_prefix text := 'claims_' || p_scope || '_';
    v_table text;
BEGIN
    IF NOT EXISTS (SELECT FROM {{schema}}.generations WHERE scope = p_scope AND state = 'open') THEN
        RETURN;
    END IF;
    PERFORM set_config('lock_timeout', p_lock_timeout, true);
    FOR v_table IN
        SELECT relname FROM pg_class
        WHERE relnamespace = $s${{schema}}$s$::regnamespace AND relkind = 'r'
          AND starts_with(relname, v_prefix) AND substr(relname, length(v_prefix) + 1) ~ '^[0-9]{1,9}$'
          AND NOT EXISTS (SELECT FROM {{schema}}.generations WHERE table_name = relname)
    LOOP
        EXECUTE format('DROP TABLE {{schema}}.%I', v_table);
        RETURN NEXT v_table;
    END LOOP;
    DELETE FROM {{schema}}.filters f WHERE NOT EXISTS (SELECT FROM {{schema}}.generations g WHERE g.identity = f.identity);
END $$;

REVOKE ALL ON FUNCTION {{schema}}.prepare_generation(text), {{schema}}.rotate(text, uuid, text), {{schema}}.expire(text, interval, interval, text),
    {{schema}}.drop_generation(text, integer, text), {{schema}}.sweep(text, text) FROM PUBLIC;

-- By the key first: claims why asks for it, and it tells rows apart sooner than
-- texts that they all share. The texts compare as bytes, whatever the database's
-- collation: they are never sorted for people, and a locale's order costs more.
DROP INDEX {{schema}}.dead_letters_place;
CREATE UNIQUE INDEX dead_letters_place ON {{schema}}.dead_letters
    (claim_key, position, class COLLATE "C", lane COLLATE "C", source COLLATE "C", scope COLLATE "C");
