-- Where pg_walfile_name() may not be called, timeline() is 'unknown', and yet the
-- history may begin with the cluster: advance() compares what stands behind it,
-- however long that is.
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
      AND CASE WHEN p_from IS NULL THEN pg_catalog.split_part(history, '/', -1) = {{schema}}.timeline() ELSE next_position = p_from END;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'lane % is fenced', p_lane USING ERRCODE = 'DD001';
    END IF;
END $$;
