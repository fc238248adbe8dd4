//go:build unix && !linux

package main

import "syscall"

// Only Linux tells a child of its parent's death: kill -9 of the demo leaves
// the worker behind.
func endWithParent(*syscall.SysProcAttr) {}
