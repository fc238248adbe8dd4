-- A topic that was deleted and created anew holds other messages at the same
-- positions.

ALTER TABLE {{schema}}.lanes
    -- log is the broker's own mark of the log that an ordered lane reads, such as a
    -- Kafka topic's id. NULL: the broker had none to tell.
    ADD COLUMN log text,
    -- moved tells that an operator has set the position since the lane was taken: it
    -- holds for whatever log is found.
    ADD COLUMN moved boolean NOT NULL DEFAULT false;
