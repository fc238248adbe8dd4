//go:build !unix

package top

import "os"

func notifyTerminal(_, _ chan<- os.Signal) {}

func suspend() {}
