// The check for known vulnerabilities, apart from the other tools: what it counts its
// use with is replaced by a version that module proxies serve.
module github.com/dedupd/dedupd/internal/tools/vuln

go 1.26.0

replace golang.org/x/telemetry => golang.org/x/telemetry v0.0.0-20240522233618-39ace7a40ae7

tool golang.org/x/vuln/cmd/govulncheck

require (
	golang.org/x/mod v0.42.0 // indirect
	golang.org/x/sync v0.24.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
	golang.org/x/telemetry v0.0.0-20261010193011-f71dc92da45e // indirect
	golang.org/x/tools v0.52.0 // indirect
	golang.org/x/vuln v1.9.0 // indirect
)
