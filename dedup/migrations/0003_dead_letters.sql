-- Dead letters that people act on: replayed through the same transaction as any
-- message, or discarded.

-- lane_id is the lanes.id under which the message was claimed, and whose books
-- count it; a lane of the same name may be another one by now. incarnation is
-- the stream's, without which an id that is a place can't be found again. Both
-- are NULL for rows of version 2, whose lane is then the one of that name.
--
-- attempts counts the tries to apply it: its burial, and each replay that failed.
-- reason and sqlstate are of the last one, at last_at.
--
-- created_at is the very moment of the claim that the burial made, for both are
-- the database's clock in one transaction. By that a dead letter knows its claim
-- from one that the same place made later, when its id had been forgotten and the
-- message was read again.
ALTER TABLE {{schema}}.dead_letters
    ADD COLUMN lane_id integer,
    ADD COLUMN incarnation text,
    ADD COLUMN attempts integer NOT NULL DEFAULT 1,
    ADD COLUMN last_at timestamptz,
    ALTER COLUMN created_at SET DEFAULT {{schema}}.clock();
UPDATE {{schema}}.dead_letters SET last_at = created_at;
ALTER TABLE {{schema}}.dead_letters
    ALTER COLUMN last_at SET DEFAULT {{schema}}.clock(),
    ALTER COLUMN last_at SET NOT NULL;

-- A conflict or a duplicate has no claim, and a queue may deliver it again after
-- it was buried: it is buried once. Any other dead letter has won the claim of its
-- id, or of its place. A place that wins once more, since the claim expired or was
-- forgotten, makes one more dead letter: else the claim would be nobody's, and the
-- message lost.
DROP INDEX {{schema}}.dead_letters_place;
CREATE UNIQUE INDEX dead_letters_place ON {{schema}}.dead_letters
    (claim_key, position, class COLLATE "C", lane COLLATE "C", source COLLATE "C", scope COLLATE "C") WHERE class IN ('conflict', 'duplicate');
CREATE INDEX dead_letters_claim_key ON {{schema}}.dead_letters (claim_key);

-- hold_claim() reads a claim and keeps it from being forgotten until the
-- transaction ends: what is decided by it stays right. The transaction must be
-- one that enter() has opened, so that the generation is what the caller thinks.
-- It has its owner's rights, since a row's lock needs the right to update.
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

-- replayed() ends the replay of a dead letter: it is gone with the transaction
-- that had its effect, or that found that its id has had one. Its lane's books
-- counted it when it was buried, and count it now as what it has become; fetched
-- stays. Where the lane is gone, or its books are not those that counted it, they
-- stay as they are. The lane itself doesn't move, and updated_at, which tells
-- whether its owner is at work, stays.
--
-- As advance() does, it refuses a transaction that enter() has not opened: a sink
-- that ends the one it was given and begins another would leave an effect and
-- the dead letter, or neither.
CREATE FUNCTION {{schema}}.replayed(p_letter bigint, p_lane integer, p_outcome text) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_letter {{schema}}.dead_letters%ROWTYPE;
    v_was text;
BEGIN
    IF pg_catalog.current_setting('dedupd.entered', true) IS DISTINCT FROM 'yes' THEN
        RAISE EXCEPTION 'the sink ended the transaction it was given: it must neither commit nor roll back' USING ERRCODE = 'DD003';
    END IF;
    DELETE FROM {{schema}}.dead_letters WHERE id = p_letter RETURNING * INTO v_letter;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the dead letter % went while it was replayed', p_letter USING ERRCODE = '40001';
    END IF;
    v_was := CASE v_letter.class
        WHEN 'conflict' THEN 'conflict'
        WHEN 'duplicate' THEN CASE WHEN (SELECT source FROM {{schema}}.lanes WHERE id = v_letter.original_lane) <> v_letter.source THEN 'cross_source' ELSE 'resent' END
        ELSE 'dead' END;
    UPDATE {{schema}}.lanes SET
        applied      = applied + (p_outcome = 'applied')::integer,
        redelivered  = redelivered + (p_outcome = 'redelivered')::integer,
        resent       = resent + (p_outcome = 'resent')::integer - (v_was = 'resent')::integer,
        cross_source = cross_source + (p_outcome = 'cross_source')::integer - (v_was = 'cross_source')::integer,
        conflicts    = conflicts - (v_was = 'conflict')::integer,
        dead         = dead - (v_was = 'dead')::integer
    WHERE id = p_lane AND CASE v_was WHEN 'conflict' THEN conflicts WHEN 'resent' THEN resent WHEN 'cross_source' THEN cross_source ELSE dead END > 0;
END $$;

-- note_dead_letter() writes what somebody did to a dead letter into the audit, and
-- nothing else: a worker's role may not write other lines, and so is kept from
-- what is done to claims and lanes by hand.
CREATE FUNCTION {{schema}}.note_dead_letter(p_scope text, p_actor text, p_action text, p_letter bigint, p_detail text) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO {{schema}}.audit (scope, actor, db_role, action, subject, detail)
    VALUES (p_scope, p_actor, session_user, 'dlq ' || p_action, 'dead letter ' || p_letter, p_detail::jsonb)
$$;

REVOKE ALL ON FUNCTION {{schema}}.hold_claim(uuid, uuid), {{schema}}.note_dead_letter(text, text, text, bigint, text) FROM PUBLIC;
