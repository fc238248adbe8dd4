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
