package main

import "syscall"

// endWithParent has the kernel kill the child when the thread that started it
// is gone: kill -9 of the demo leaves no worker.
func endWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
