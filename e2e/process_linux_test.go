package e2e

import "syscall"

// endWithParent has the kernel kill the child with the thread that started it: a
// test binary that is killed, or that ends by its time-out, leaves no worker.
func endWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
