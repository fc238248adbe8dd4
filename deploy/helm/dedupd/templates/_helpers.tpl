{{/* Names and labels. */}}

{{- define "dedupd.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* The release's name, with the chart's where it isn't in it already. 52 leave room for a CronJob's and a hook's suffix. */}}
{{- define "dedupd.fullname" -}}
{{- $name := include "dedupd.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "dedupd.namespace" -}}
{{- .Values.namespaceOverride | default .Release.Namespace -}}
{{- end -}}

{{/* What all pods of the release have in common; a component's name goes beside it. */}}
{{- define "dedupd.instanceLabels" -}}
app.kubernetes.io/name: {{ include "dedupd.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* The workers: what the Deployment, the budget and the monitors select. */}}
{{- define "dedupd.selectorLabels" -}}
{{ include "dedupd.instanceLabels" . }}
app.kubernetes.io/component: worker
{{- end -}}

{{/* metadata of an object: (dict "root" $ "suffix" "-x" "component" "x" "labels" dict "annotations" dict "namespace" ""). */}}
{{- define "dedupd.metadata" -}}
{{- $root := .root -}}
{{- $labels := include "dedupd.instanceLabels" $root | fromYaml -}}
{{- $_ := set $labels "app.kubernetes.io/component" (.component | default "worker") -}}
{{- $_ := set $labels "app.kubernetes.io/version" $root.Chart.AppVersion -}}
{{- $_ := set $labels "app.kubernetes.io/managed-by" $root.Release.Service -}}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" $root.Chart.Name ($root.Chart.Version | replace "+" "_")) -}}
{{- $labels = merge $labels (.labels | default dict) $root.Values.labels -}}
{{- $annotations := merge (dict) (.annotations | default dict) $root.Values.annotations -}}
name: {{ include "dedupd.fullname" $root }}{{ .suffix }}
namespace: {{ .namespace | default (include "dedupd.namespace" $root) }}
labels:
  {{- toYaml $labels | nindent 2 }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "dedupd.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "dedupd.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "dedupd.image" -}}
{{- $image := .Values.image -}}
{{- $registry := .Values.global.imageRegistry | default $image.registry | trimSuffix "/" -}}
{{- if not $image.repository -}}
{{- fail "image.repository is empty: name the image, without its registry and tag" -}}
{{- end -}}
{{- $name := $image.repository -}}
{{- if $registry }}{{ $name = printf "%s/%s" $registry $name }}{{ end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name ($image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* A list of the objects that pull secrets are in a pod. */}}
{{- define "dedupd.pullSecrets" -}}
{{- $all := list -}}
{{- range concat .Values.global.imagePullSecrets .Values.imagePullSecrets -}}
{{- if kindIs "string" . }}{{ $all = append $all (dict "name" .) }}{{ else }}{{ $all = append $all . }}{{ end -}}
{{- end -}}
{{- with $all | uniq }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* Quantities. */}}

{{/* Seconds of a duration as dedupd writes it, rounded up: (list "shutdown.drain" "1m30s"). */}}
{{- define "dedupd.seconds" -}}
{{- $key := index . 0 -}}
{{- $text := index . 1 | toString -}}
{{- if not (regexMatch "^([0-9]+(\\.[0-9]+)?(w|d|h|ms|us|µs|ns|m|s))+$" $text) -}}
{{- fail (printf "config.%s is %q, which the chart can't read: write a duration such as 15s, 1m30s or 7d" $key $text) -}}
{{- end -}}
{{- $units := dict "w" 604800.0 "d" 86400.0 "h" 3600.0 "m" 60.0 "s" 1.0 "ms" 0.001 "us" 0.000001 "µs" 0.000001 "ns" 0.000000001 -}}
{{- $sum := 0.0 -}}
{{- range regexFindAll "[0-9.]+(w|d|h|ms|us|µs|ns|m|s)" $text -1 -}}
{{- $unit := regexFind "[a-zµ]+$" . -}}
{{- $sum = addf $sum (mulf (trimSuffix $unit . | float64) (get $units $unit)) -}}
{{- end -}}
{{- ceil $sum | int64 -}}
{{- end -}}

{{/* Bytes of a quantity of memory as Kubernetes writes it: (list "resources.limits.memory" "512Mi"). */}}
{{- define "dedupd.bytes" -}}
{{- $key := index . 0 -}}
{{- $value := index . 1 -}}
{{- $text := ternary (printf "%v" $value) (printf "%.0f" (float64 $value)) (kindIs "string" $value) -}}
{{- if not (regexMatch "^[0-9]+(\\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$" $text) -}}
{{- fail (printf "%s is %q, which the chart can't read: write it like 512Mi, 1Gi, 500M or in bytes, or set memoryLimitPercent to 0" $key $text) -}}
{{- end -}}
{{- $units := dict "" 1.0 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit) | int64 -}}
{{- end -}}

{{/* Bytes of a size as dedupd writes it, 0 if unknown. */}}
{{- define "dedupd.configBytes" -}}
{{- $text := ternary (printf "%v" .) (printf "%.0f" (float64 .)) (kindIs "string" .) -}}
{{- $units := dict "" 1.0 "B" 1.0 "KiB" 1024.0 "MiB" 1048576.0 "GiB" 1073741824.0 "TiB" 1099511627776.0 "KB" 1e3 "kB" 1e3 "MB" 1e6 "GB" 1e9 "TB" 1e12 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- if and (regexMatch "^[0-9]+(\\.[0-9]+)? ?[A-Za-z]*$" $text) (hasKey $units $unit) -}}
{{- mulf (trimSuffix $unit $text | trim | float64) (get $units $unit) | int64 -}}
{{- else -}}0{{- end -}}
{{- end -}}

{{/* The configuration and its secrets. */}}

{{/* Where the keys of secrets are mounted. */}}
{{- define "dedupd.secretsPath" -}}/etc/dedupd/secrets{{- end -}}

{{- define "dedupd.sourceName" -}}
{{- .name | default (ternary "nats" "kafka" (hasKey . "nats")) -}}
{{- end -}}

{{/* The files of secrets: a list of name, key and path, as {files: […]}. */}}
{{- define "dedupd.files" -}}
{{- $keys := dict "url" "url" "username" "username" "password" "password" "creds" "creds" "nkeySeed" "seed" "ca" "ca.crt" "cert" "tls.crt" "key" "tls.key" -}}
{{- $files := list -}}
{{- range $use, $ref := .Values.secrets.database -}}
{{- if $ref -}}
{{- $files = append $files (dict "name" $ref.name "key" ($ref.key | default (get $keys $use)) "path" (printf "database/%s" $use)) -}}
{{- end -}}
{{- end -}}
{{- range $source, $uses := .Values.secrets.sources -}}
{{- range $use, $ref := $uses -}}
{{- if and $ref (ne $use "username") -}}
{{- $files = append $files (dict "name" $ref.name "key" ($ref.key | default (get $keys $use)) "path" (printf "sources/%s/%s" $source $use)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "files" $files) -}}
{{- end -}}

{{/* The variable that holds a source's user. */}}
{{- define "dedupd.usernameVariable" -}}
{{- printf "SOURCE_%s_USERNAME" (. | upper | replace "-" "_") -}}
{{- end -}}

{{/* The configuration that the worker reads: the user's, and what containers need. */}}
{{- define "dedupd.config" -}}
{{- if and .Values.config .Values.existingConfigMap -}}
{{- fail "config and existingConfigMap are both set: keep one of the two" -}}
{{- end -}}
{{- if not (or .Values.config .Values.existingConfigMap) -}}
{{- fail "config is empty: write dedupd's configuration under config (scope, sources, sink), or name a ConfigMap that has it as existingConfigMap" -}}
{{- end -}}
{{- $config := deepCopy (.Values.config | default dict) -}}
{{- range $part := list "database" "http" "log" "shutdown" -}}
{{- if not (get $config $part) }}{{ $_ := set $config $part dict }}{{ end -}}
{{- end -}}
{{- $path := include "dedupd.secretsPath" . -}}

{{- if hasKey $config.http "listen" -}}
{{- fail "config.http.listen is set, but the chart gives the address by DEDUPD_HTTP_LISTEN: set port instead" -}}
{{- end -}}
{{- if not $config.log.format }}{{ $_ := set $config.log "format" "json" }}{{ end -}}

{{- $database := $config.database -}}
{{- if .Values.secrets.database.url -}}
{{- if or $database.url $database.url_file -}}
{{- fail "config.database has a URL, and secrets.database.url is set: keep one of the two" -}}
{{- end -}}
{{- $_ := set $database "url_file" (printf "%s/database/url" $path) -}}
{{- end -}}
{{- $mode := .Values.migrations.mode -}}
{{- if and (hasKey $database "migrate") (ne (toString $database.migrate) (toString (eq $mode "startup"))) -}}
{{- fail (printf "config.database.migrate is %v, but migrations.mode is %s: remove the key, the mode decides" $database.migrate $mode) -}}
{{- end -}}
{{- range $i, $pipeline := $config.pipelines -}}
{{- if hasKey ($pipeline.database | default dict) "migrate" -}}
{{- fail (printf "config.pipelines[%d].database.migrate is set: remove the key, migrations.mode decides for all" $i) -}}
{{- end -}}
{{- end -}}
{{- if ne $mode "startup" }}{{ $_ := set $database "migrate" false }}{{ end -}}

{{- $names := list -}}
{{- range $part := prepend ($config.pipelines | default list) $config -}}
{{- range $source := $part.sources -}}
{{- $name := include "dedupd.sourceName" $source -}}
{{- $names = append $names $name -}}
{{- $kind := ternary "nats" "kafka" (hasKey $source "nats") -}}
{{- $part := get $source $kind -}}
{{- $uses := get $.Values.secrets.sources $name | default dict -}}
{{- $foreign := ternary (list "username" "password") (list "creds" "nkeySeed") (eq $kind "nats") -}}
{{- range $use, $ref := $uses -}}
{{- if not $ref }}{{ continue }}{{ end -}}
{{- if has $use $foreign -}}
{{- fail (printf "secrets.sources.%s.%s has no meaning for a source of kind %s" $name $use $kind) -}}
{{- end -}}
{{- $file := printf "%s/sources/%s/%s" $path $name $use -}}
{{- if has $use (list "ca" "cert" "key") -}}
{{- if not $part.tls }}{{ $_ := set $part "tls" dict }}{{ end -}}
{{- if not (hasKey $part.tls "enabled") }}{{ $_ := set $part.tls "enabled" true }}{{ end -}}
{{- if not (get $part.tls (printf "%s_file" $use)) }}{{ $_ := set $part.tls (printf "%s_file" $use) $file }}{{ end -}}
{{- else if eq $use "creds" -}}
{{- if not $part.creds_file }}{{ $_ := set $part "creds_file" $file }}{{ end -}}
{{- else if eq $use "nkeySeed" -}}
{{- if not $part.nkey_seed_file }}{{ $_ := set $part "nkey_seed_file" $file }}{{ end -}}
{{- else -}}
{{- if not $part.sasl }}{{ $_ := set $part "sasl" dict }}{{ end -}}
{{- if eq $use "password" -}}
{{- if not (or $part.sasl.password $part.sasl.password_file) }}{{ $_ := set $part.sasl "password_file" $file }}{{ end -}}
{{- else if not $part.sasl.username -}}
{{- $_ := set $part.sasl "username" (printf "${%s}" (include "dedupd.usernameVariable" $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if .Values.config -}}
{{- range $name, $_ := .Values.secrets.sources -}}
{{- if not (has $name $names) -}}
{{- fail (printf "secrets.sources.%s: config has no source of that name, only %s" $name (join ", " (uniq $names))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $part := list "database" "http" "log" "shutdown" -}}
{{- if not (get $config $part) }}{{ $_ := unset $config $part }}{{ end -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* kafka if any source is, or if the chart can't know; nats otherwise. */}}
{{- define "dedupd.kind" -}}
{{- $config := .Values.config | default dict -}}
{{- $kinds := list -}}
{{- range prepend ($config.pipelines | default list) $config -}}
{{- range .sources }}{{ $kinds = append $kinds (ternary "kafka" "nats" (hasKey . "kafka")) }}{{ end -}}
{{- end -}}
{{- ternary "kafka" "nats" (or (empty $kinds) (has "kafka" $kinds)) -}}
{{- end -}}

{{/* The largest number of workers that the chart knows of. */}}
{{- define "dedupd.maxWorkers" -}}
{{- if .Values.autoscaling.keda.enabled -}}{{ .Values.autoscaling.keda.maxReplicas }}
{{- else if .Values.autoscaling.hpa.enabled -}}{{ .Values.autoscaling.hpa.maxReplicas }}
{{- else -}}{{ .Values.replicas }}
{{- end -}}
{{- end -}}

{{/* The environment that the chart sets itself, as {env: […]}. */}}
{{- define "dedupd.ownEnv" -}}
{{- $env := list (dict "name" "DEDUPD_HTTP_LISTEN" "value" (printf ":%d" (int .Values.port))) -}}
{{- $limit := ((.Values.resources).limits).memory -}}
{{- if and $limit (gt (int .Values.memoryLimitPercent) 0) -}}
{{- $bytes := include "dedupd.bytes" (list "resources.limits.memory" $limit) | int64 -}}
{{- $env = append $env (dict "name" "GOMEMLIMIT" "value" (toString (div (mul $bytes (int64 .Values.memoryLimitPercent)) 100))) -}}
{{- $env = append $env (dict "name" "GOGC" "value" "400") -}}
{{- end -}}
{{- $path := include "dedupd.secretsPath" . -}}
{{- range $use, $variable := dict "ca" "PGSSLROOTCERT" "cert" "PGSSLCERT" "key" "PGSSLKEY" -}}
{{- if get $.Values.secrets.database $use -}}
{{- $env = append $env (dict "name" $variable "value" (printf "%s/database/%s" $path $use)) -}}
{{- end -}}
{{- end -}}
{{- range $source, $uses := .Values.secrets.sources -}}
{{- with $uses.username -}}
{{- $ref := dict "name" .name "key" (.key | default "username") -}}
{{- $env = append $env (dict "name" (include "dedupd.usernameVariable" $source) "valueFrom" (dict "secretKeyRef" $ref)) -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "env" $env) -}}
{{- end -}}

{{/* The whole environment. A name that appears twice is an error of the API server, so it is one here. */}}
{{- define "dedupd.env" -}}
{{- $env := (include "dedupd.ownEnv" . | fromYaml).env -}}
{{- $names := list -}}
{{- range $env }}{{ $names = append $names .name }}{{ end -}}
{{- $own := $names -}}
{{- range .Values.extraEnv -}}
{{- if has .name $own -}}
{{- $cure := dict "DEDUPD_HTTP_LISTEN" "set port instead" "GOMEMLIMIT" "set memoryLimitPercent to 0 to set it yourself" "GOGC" "set memoryLimitPercent to 0 to set it yourself" -}}
{{- fail (printf "extraEnv has %s, which the chart sets itself: %s" .name (get $cure .name | default "remove it here, or under secrets")) -}}
{{- end -}}
{{- if has .name $names }}{{ fail (printf "extraEnv has %s twice: keep one of the two" .name) }}{{ end -}}
{{- $names = append $names .name -}}
{{- $env = append $env . -}}
{{- end -}}
{{- toYaml $env -}}
{{- end -}}

{{/* Checks of values against each other. */}}
{{- define "dedupd.check" -}}
{{- $scalers := list -}}
{{- if .Values.autoscaling.hpa.enabled }}{{ $scalers = append $scalers "autoscaling.hpa.enabled" }}{{ end -}}
{{- if .Values.autoscaling.keda.enabled }}{{ $scalers = append $scalers "autoscaling.keda.enabled" }}{{ end -}}
{{- if .Values.autoscaling.external }}{{ $scalers = append $scalers "autoscaling.external" }}{{ end -}}
{{- if gt (len $scalers) 1 -}}
{{- fail (printf "%s are both set: two that scale the same Deployment work against each other; keep one" (join " and " (slice $scalers 0 2))) -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled .Values.serviceMonitor.enabled -}}
{{- fail "podMonitor.enabled and serviceMonitor.enabled are both set: everything would be counted twice; keep one" -}}
{{- end -}}
{{- $drain := ((.Values.config).shutdown).drain | default "15s" -}}
{{- $need := add (include "dedupd.seconds" (list "shutdown.drain" $drain) | int64) 20 -}}
{{- $sleep := (((.Values.lifecycle).preStop).sleep).seconds | default 0 | int64 -}}
{{- $need = add $need $sleep -}}
{{- if lt (int64 .Values.terminationGracePeriodSeconds) $need -}}
{{- $hook := ternary (printf ", lifecycle.preStop's %d s" $sleep) "" (gt $sleep 0) -}}
{{- fail (printf "terminationGracePeriodSeconds is %d, but shutdown.drain %v%s and 20 s for leaving need %d: raise it" (int64 .Values.terminationGracePeriodSeconds) $drain $hook $need) -}}
{{- end -}}
{{- end -}}
