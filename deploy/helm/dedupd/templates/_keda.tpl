{{/* A value of the configuration for KEDA, as text: (list "config.sources[0].kafka.brokers" VALUE). */}}
{{- define "dedupd.kedaValue" -}}
{{- $value := index . 1 -}}
{{- $text := ternary (join "," $value) (toString $value) (kindIs "slice" $value) -}}
{{- if contains "${" $text -}}
{{- fail (printf "%s is %q: only the worker knows its environment; write it out for KEDA, or use autoscaling.keda.mode prometheus" (index . 0) $text) -}}
{{- end -}}
{{- $text -}}
{{- end -}}

{{/* What the ScaledObject goes by: {triggers: […], authentications: [{suffix, refs}]}. */}}
{{- define "dedupd.kedaTriggers" -}}
{{- $keda := .Values.autoscaling.keda -}}
{{- $threshold := toString (int64 $keda.lagThreshold) -}}
{{- $triggers := list -}}
{{- $authentications := list -}}
{{- $suffixes := list -}}
{{- if eq $keda.mode "prometheus" -}}
{{- if not $keda.prometheus.serverAddress }}{{ fail "autoscaling.keda.prometheus.serverAddress is empty: mode prometheus needs the server's URL" }}{{ end -}}
{{- $query := $keda.prometheus.query | default (printf `sum(max by (scope, source, lane) (dedupd_lag_messages{namespace=%q,pod=~"%s-[a-z0-9]+-[a-z0-9]+"}))` (include "dedupd.namespace" .) (include "dedupd.fullname" .)) -}}
{{- $trigger := dict "type" "prometheus" "metadata" (dict "serverAddress" $keda.prometheus.serverAddress "query" $query "threshold" $threshold) -}}
{{- with $keda.triggerAuthentication }}{{ $_ := set $trigger "authenticationRef" (dict "name" .) }}{{ end -}}
{{- $triggers = append $triggers $trigger -}}
{{- else -}}
{{- if .Values.existingConfigMap -}}
{{- fail (printf "autoscaling.keda.mode is %s, which reads brokers and names from config, but existingConfigMap is set: use mode prometheus" $keda.mode) -}}
{{- end -}}
{{- $config := include "dedupd.config" . | fromYaml -}}
{{- range $n, $part := $config.pipelines | default (list $config) -}}
{{- $own := and $config.pipelines $part.sources -}}
{{- $above := ternary (printf "config.pipelines[%d]" $n) "config" (not (empty $own)) -}}
{{- range $i, $source := $own | default $config.sources -}}
{{- if and (eq $keda.mode "kafka") $source.kafka -}}
{{- $at := printf "%s.sources[%d].kafka" $above $i -}}
{{- $kafka := $source.kafka -}}
{{- $name := include "dedupd.sourceName" $source -}}
{{- $metadata := dict
  "bootstrapServers" (include "dedupd.kedaValue" (list (printf "%s.brokers" $at) $kafka.brokers))
  "consumerGroup" (include "dedupd.kedaValue" (list (printf "%s.group" $at) ($kafka.group | default $part.scope)))
  "lagThreshold" $threshold
  "offsetResetPolicy" (ternary "earliest" "latest" (eq ($kafka.start | default "earliest") "earliest"))
  "excludePersistentLag" "true"
-}}
{{- $refs := list -}}
{{- $uses := get $.Values.secrets.sources $name | default dict -}}
{{- if ($kafka.tls).enabled -}}
{{- $_ := set $metadata "tls" "enable" -}}
{{- range $use, $key := dict "ca" "ca.crt" "cert" "tls.crt" "key" "tls.key" -}}
{{- with get $uses $use }}{{ $refs = append $refs (dict "parameter" $use "name" .name "key" (.key | default $key)) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- with ($kafka.sasl).mechanism -}}
{{- $_ := set $metadata "sasl" (get (dict "plain" "plaintext" "scram-sha-256" "scram_sha256" "scram-sha-512" "scram_sha512") . | required (printf "%s.sasl.mechanism: KEDA doesn't know it" $at)) -}}
{{- range $use := list "username" "password" -}}
{{- $ref := get $uses $use -}}
{{- if $ref }}{{ $refs = append $refs (dict "parameter" $use "name" $ref.name "key" ($ref.key | default $use)) }}
{{- else if not $keda.triggerAuthentication -}}
{{- fail (printf "secrets.sources.%s.%s is missing: KEDA takes user and password from a Secret; name it there, or a TriggerAuthentication of yours as autoscaling.keda.triggerAuthentication" $name $use) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $reference := $keda.triggerAuthentication -}}
{{- if and $refs (not $reference) -}}
{{- $suffix := printf "-%s" (ternary (printf "%s-%s" $part.scope $name) $name (not (empty $own)) | replace "_" "-") -}}
{{- if not (has $suffix $suffixes) -}}
{{- $suffixes = append $suffixes $suffix -}}
{{- $authentications = append $authentications (dict "suffix" $suffix "refs" $refs) -}}
{{- end -}}
{{- $reference = printf "%s%s" (include "dedupd.fullname" $) $suffix -}}
{{- end -}}
{{- $topics := splitList "," (include "dedupd.kedaValue" (list (printf "%s.topics" $at) $kafka.topics)) -}}
{{- range $topics -}}
{{- $trigger := dict "type" "kafka" "metadata" (merge (dict "topic" .) $metadata) -}}
{{- with $reference }}{{ $_ := set $trigger "authenticationRef" (dict "name" .) }}{{ end -}}
{{- $triggers = append $triggers $trigger -}}
{{- end -}}
{{- else if and (eq $keda.mode "nats") $source.nats -}}
{{- $at := printf "%s.sources[%d].nats" $above $i -}}
{{- if not $keda.nats.monitoringEndpoint }}{{ fail "autoscaling.keda.nats.monitoringEndpoint is empty: mode nats reads the servers' monitoring, such as nats.nats.svc.cluster.local:8222" }}{{ end -}}
{{- $trigger := dict "type" "nats-jetstream" "metadata" (dict
  "natsServerMonitoringEndpoint" $keda.nats.monitoringEndpoint
  "account" $keda.nats.account
  "stream" (include "dedupd.kedaValue" (list (printf "%s.stream" $at) $source.nats.stream))
  "consumer" (include "dedupd.kedaValue" (list (printf "%s.durable" $at) ($source.nats.durable | default $part.scope)))
  "lagThreshold" $threshold
  "useHttps" (toString $keda.nats.https)
) -}}
{{- with $keda.triggerAuthentication }}{{ $_ := set $trigger "authenticationRef" (dict "name" .) }}{{ end -}}
{{- $triggers = append $triggers $trigger -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not $triggers -}}
{{- fail (printf "autoscaling.keda.mode is %s, but config has no such source: use another mode" $keda.mode) -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "triggers" $triggers "authentications" $authentications) -}}
{{- end -}}
