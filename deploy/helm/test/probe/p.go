package main

import (
	_ "github.com/dedupd/dedupd/internal/config"
	_ "github.com/dedupd/dedupd/sinks/statement"
	_ "github.com/dedupd/dedupd/sinks/table"
	_ "helm.sh/helm/v4/pkg/chart/v2/loader"
	_ "helm.sh/helm/v4/pkg/chart/common/util"
	_ "helm.sh/helm/v4/pkg/engine"
	_ "github.com/yannh/kubeconform/pkg/validator"
	_ "k8s.io/api/apps/v1"
	_ "k8s.io/api/autoscaling/v2"
	_ "k8s.io/api/batch/v1"
	_ "k8s.io/api/policy/v1"
	_ "k8s.io/api/networking/v1"
	_ "k8s.io/pod-security-admission/policy"
	_ "sigs.k8s.io/yaml"
)

func main() {}
