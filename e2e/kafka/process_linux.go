package kafka

import "syscall"

// dieWithParent leaves no broker behind when a test binary is killed with
// SIGKILL or by a test time-out.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
