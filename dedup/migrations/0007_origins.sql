-- Where a lane began: for the day on which the database loses its row, and for the
-- partitions that come later.

ALTER TABLE {{schema}}.lanes
    -- began is the lowest position of the present log that the lane has begun at or
    -- was set to: below it nothing had an effect. NULL: from before it was noted.
    ADD COLUMN began bigint,
    -- partitions is how many of them the lane's topic had when the lane was first
    -- taken. NULL: the lane is no partition, or wasn't taken since this is noted.
    ADD COLUMN partitions integer;
