// Package test holds the tests of dedupd's Helm chart. They render it with
// Helm's own engine and judge the objects, as strict schemas, Kubernetes' own
// types, the profile restricted and dedupd's own configuration loader see them.
//
//	go test . -update    writes what is generated: testdata/golden, the chart's README and values.schema.json
package test
