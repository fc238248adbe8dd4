// Package e2e drives the real binary against a real Kafka broker, a real NATS
// server and a real Postgres, and judges what came of it with code of its own.
// It has nothing but tests; they stand in this package's _test files.
//
// It imports none of the product's packages, so that nothing of the product
// judges itself, and it talks to Kafka by another client library than the worker
// does: a bug of that library would otherwise be invisible. What it knows of
// dedupd are the names that its users rely on: commands, exit codes, metrics, and
// the views in the database.
//
// A seed is printed by each test that throws dice; DEDUPD_TEST_SEED repeats it.
// DEDUPD_TEST_RACE=1 builds the binary with the race detector, for a slow run.
// Without the servers' binaries the tests fail and say how to get them; go test
// -short, which is for tests without services, skips them.
package e2e
