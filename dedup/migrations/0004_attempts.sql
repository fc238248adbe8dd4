-- Messages that end the process: out of memory, a crash, a sink that hangs. No
-- error tells of them, so the database must.

-- takes counts how often an ordered lane was taken since it last moved, was
-- caught up, or was let go as it should be.
--
-- recent_dead are the last dead letters of a lane, by their numbers as fetched
-- counts them: a worker that ends must not make its successors forget how many
-- there were.
ALTER TABLE {{schema}}.lanes
    ADD COLUMN takes integer NOT NULL DEFAULT 0,
    ADD COLUMN recent_dead bigint[] NOT NULL DEFAULT '{}';

-- A message of a lane under suspicion, noted before the sink is given it, and
-- forgotten when the try has an answer: what stands here ended its worker, or is
-- being tried now. tries counts the former, and the latter as one. worker is a
-- process: what a process that goes on tries again has had its answer.
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

-- A lane that moves is past what may have ended a process.
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
    WHERE id = p_lane AND epoch = p_epoch AND (p_from IS NULL OR next_position = p_from);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'lane % is fenced', p_lane USING ERRCODE = 'DD001';
    END IF;
END $$;
