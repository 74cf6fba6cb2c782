#!/usr/bin/env bash
# A Ceph RADOS Gateway with all that it needs, in one folder and on the loopback only:
#   rgw.sh FOLDER MON_PORT RGW_PORT TLS_PORT CERTIFICATE ACCESS_KEY SECRET_KEY [BYTES]
# Says `ready` in FOLDER/state once it serves, and runs until its standard input is closed, at most
# half an hour. Needs root, and Debian's ceph-mon, ceph-mgr, ceph-osd, radosgw and ceph-common.
set -euo pipefail
folder=$(cd "$1" && pwd) mon_port=$2 rgw_port=$3 tls_port=$4 certificate=$5
access_key=$6 secret_key=$7 bytes=${8:-2147483648}
export CEPH_CONF=$folder/ceph.conf
daemons=()
# First touch of memory takes these daemons longer than all else: what they free, they keep.
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=17179869184
export MALLOC_TOP_PAD_=67108864 GLIBC_TUNABLES=glibc.malloc.hugetlb=1

finish() {
  trap - EXIT INT TERM
  for pid in "${daemons[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
  wait
  rm -rf "$folder"/{mon,mgr,osd,run}
}
trap finish EXIT
trap 'exit 1' INT TERM

# In the foreground as a child: it ends with this script, also where that is killed.
start() {
  setpriv --pdeathsig KILL "$@" </dev/null >>"$folder/daemons.log" 2>&1 &
  daemons+=($!)
}

soon() { # until a command works
  for _ in $(seq 900); do
    if timeout 10 "$@" >/dev/null 2>&1; then return; fi
    for pid in "${daemons[@]}"; do
      kill -0 "$pid" 2>/dev/null || { echo "a daemon ended by itself" >&2; return 1; }
    done
    sleep 0.1
  done
  echo "it never came to this: $*" >&2
  return 1
}

mkdir -p "$folder"/{mon,mgr,osd,run}
cat >"$CEPH_CONF" <<CONF
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon_host = v2:127.0.0.1:$mon_port
public_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
auth_allow_insecure_global_id_reclaim = false
# A gateway insists on encryption, which there is none of without keys.
ms_mon_client_mode = crc
# They talk to each other over the loopback only.
ms_crc_data = false
ms_crc_header = false
run_dir = $folder/run
admin_socket = $folder/run/\$name.asok
pid_file = $folder/run/\$name.pid
crash_dir = $folder/run
log_file = $folder/\$name.log
log_to_stderr = false
mon_cluster_log_file = $folder/cluster.log
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pgp_num = 4
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
mon_data_avail_crit = 1
mon_data_avail_warn = 2
[mon]
mon_data = $folder/mon
[mgr]
mgr_data = $folder/mgr
mgr_initial_modules =
[osd]
osd_data = $folder/osd
osd_objectstore = memstore
# A full one makes writers wait for ever.
memstore_device_bytes = $bytes
osd_class_update_on_start = false
osd_memory_target = 1073741824
[client.rgw.test]
# Without tcp_nodelay a small answer waits up to 40 ms for the acknowledgement of the one before.
rgw_frontends = beast endpoint=127.0.0.1:$rgw_port ssl_endpoint=127.0.0.1:$tls_port ssl_certificate=$certificate tcp_nodelay=1
rgw_thread_pool_size = 32
rgw_enable_usage_log = false
# What was deleted is freed within seconds, not hours.
rgw_gc_obj_min_wait = 1
rgw_gc_processor_period = 2
rgw_gc_processor_max_time = 2
rgw_lifecycle_work_time = 00:00-00:01
CONF

ceph-authtool --create-keyring "$folder/keyring" --gen-key -n mon. --cap mon 'allow *' >/dev/null
monmaptool --create --clobber --fsid "$(sed -n 's/^fsid = //p' "$CEPH_CONF")" \
  --addv a "[v2:127.0.0.1:$mon_port]" "$folder/monmap" >/dev/null
ceph-mon -i a --mkfs --monmap "$folder/monmap" --keyring "$folder/keyring"
start ceph-mon -f -i a
soon ceph -s
start ceph-mgr -f -i a
osd_id=$(cat /proc/sys/kernel/random/uuid)
ceph osd new "$osd_id" >/dev/null
ceph-osd -i 0 --mkfs --osd-uuid "$osd_id"
start ceph-osd -f -i 0
soon sh -c 'ceph osd stat | grep -q "1 up"'
start radosgw -f -n client.rgw.test
radosgw-admin user create --uid test --display-name test \
  --access-key "$access_key" --secret-key "$secret_key" >/dev/null
soon bash -c ": </dev/tcp/127.0.0.1/$rgw_port"
echo ready >"$folder/state"
read -r -t 1800 _ || true
