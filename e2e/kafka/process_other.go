//go:build !linux

package kafka

import "syscall"

// dieWithParent can't be had here: a killed test binary leaves its broker behind.
func dieWithParent() *syscall.SysProcAttr { return nil }
