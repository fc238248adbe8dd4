-- Where a lane began, for the day on which the database loses its row.

ALTER TABLE {{schema}}.lanes
    -- began is the lowest position of the present log that the lane has begun at or
    -- was set to: below it nothing had an effect. NULL: from before it was noted.
    ADD COLUMN began bigint;
