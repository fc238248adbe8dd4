//go:build unix && !linux

package e2e

import "syscall"

// Only Linux tells a child of its parent's death.
func endWithParent(*syscall.SysProcAttr) {}
