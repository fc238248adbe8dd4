-- Failovers of the database, as a queue must notice them. An ordered lane sees by
-- its position that commits are lost; a queue has none.

-- timeline() is the history that the server writes: a promoted replica and a
-- restore to a point in time begin a new one. history() tells clusters apart, too,
-- such as one that a dump was restored into. It reads a file, which is too dear for
-- every transaction. Where a service forbids these functions nothing is noticed.
CREATE FUNCTION {{schema}}.timeline() RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 1, 8);
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    RETURN 'unknown';
END $$;

CREATE FUNCTION {{schema}}.history() RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT system_identifier FROM pg_catalog.pg_control_system()) || '/' || {{schema}}.timeline();
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    RETURN {{schema}}.timeline();
END $$;

-- history is the one in which all that the queue's broker was told is durable. In
-- another one it may have been told of commits that are lost. NULL for an ordered
-- lane.
ALTER TABLE {{schema}}.lanes ADD COLUMN history text;

-- A queue's lane doesn't move in a history that isn't the one it was taken in. And a
-- lane that moves is past what may have ended a process.
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
        updated_at      = now(),
        takes           = 0
    WHERE id = p_lane AND epoch = p_epoch
      AND CASE WHEN p_from IS NULL THEN right(history, 8) = {{schema}}.timeline() ELSE next_position = p_from END;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'lane % is fenced', p_lane USING ERRCODE = 'DD001';
    END IF;
END $$;
