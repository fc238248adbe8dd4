-- What a run is audited by. {{schema}} is the quoted name of dedupd's schema,
-- which must be there already. Running it again changes nothing.

-- The sink's table. Its id has no unique index on purpose: one would hide the very
-- doubles it is to show. A sink fills id, lane, position and sum, and source where
-- two sources have lanes of one name. The sum is the value's SHA-256, such as
-- encode(sha256(value), 'hex') in a sink of kind statement; or the "sum" that the
-- value, being a JSON object, carries (json:sum in a sink of kind table).
CREATE TABLE IF NOT EXISTS public.effects (
    number   bigint GENERATED ALWAYS AS IDENTITY,
    id       text NOT NULL,
    lane     text NOT NULL,
    source   text,
    position bigint NOT NULL,
    sum      text NOT NULL,
    worker   text NOT NULL DEFAULT current_setting('application_name'),
    xid      xid8 NOT NULL DEFAULT pg_current_xact_id()
);

-- Every insert, update and delete of a lane's row, in the order in which the row
-- was changed: the number is drawn while the row is locked. Counts are what was
-- added to the books.
CREATE TABLE IF NOT EXISTS public.moves (
    number        bigint GENERATED ALWAYS AS IDENTITY,
    at            timestamptz NOT NULL DEFAULT clock_timestamp(),
    wal           pg_lsn NOT NULL DEFAULT pg_current_wal_insert_lsn(),
    xid           xid8 NOT NULL DEFAULT pg_current_xact_id(),
    op            text NOT NULL,
    scope         text NOT NULL,
    source        text NOT NULL,
    lane          text NOT NULL,
    lane_id       integer NOT NULL,
    ordered       boolean NOT NULL,
    from_position bigint,
    to_position   bigint,
    epoch         bigint NOT NULL,
    owner         text NOT NULL,
    fetched       bigint NOT NULL,
    applied       bigint NOT NULL,
    redelivered   bigint NOT NULL,
    resent        bigint NOT NULL,
    cross_source  bigint NOT NULL,
    conflicts     bigint NOT NULL,
    dead          bigint NOT NULL,
    filtered      bigint NOT NULL,
    already_present bigint NOT NULL,
    stale         bigint NOT NULL,
    rejected      bigint NOT NULL
);

-- With its owner's rights: a worker's role has none on public.moves.
CREATE OR REPLACE FUNCTION public.record_move() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_row {{schema}}.lanes := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
BEGIN
    INSERT INTO public.moves (op, scope, source, lane, lane_id, ordered, from_position, to_position, epoch, owner,
        fetched, applied, redelivered, resent, cross_source, conflicts, dead, filtered, already_present, stale, rejected)
    VALUES (lower(TG_OP), v_row.scope, v_row.source, v_row.lane, v_row.id, v_row.ordered, OLD.next_position, NEW.next_position, v_row.epoch, v_row.owner,
        coalesce(NEW.fetched, 0) - coalesce(OLD.fetched, 0),
        coalesce(NEW.applied, 0) - coalesce(OLD.applied, 0),
        coalesce(NEW.redelivered, 0) - coalesce(OLD.redelivered, 0),
        coalesce(NEW.resent, 0) - coalesce(OLD.resent, 0),
        coalesce(NEW.cross_source, 0) - coalesce(OLD.cross_source, 0),
        coalesce(NEW.conflicts, 0) - coalesce(OLD.conflicts, 0),
        coalesce(NEW.dead, 0) - coalesce(OLD.dead, 0),
        coalesce(NEW.filtered, 0) - coalesce(OLD.filtered, 0),
        coalesce(NEW.already_present, 0) - coalesce(OLD.already_present, 0),
        coalesce(NEW.stale, 0) - coalesce(OLD.stale, 0),
        coalesce(NEW.rejected, 0) - coalesce(OLD.rejected, 0));
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER record_move AFTER INSERT OR UPDATE OR DELETE ON {{schema}}.lanes
    FOR EACH ROW EXECUTE FUNCTION public.record_move();
