#!/usr/bin/env bash
# Certificates for services on several nodes, from an authority of their own (openssl 1.1.1 or later):
#
#     deploy/certificates.sh FOLDER NAME[,NAME...] [NAME[,NAME...] ...]
#
# makes FOLDER/ca.pem and FOLDER/ca.key, unless they are there, and for each argument FOLDER/FIRST_NAME.pem and FIRST_NAME.key, a
# certificate for all its names: DNS names, *.wildcards or addresses, as clients and other replicas write them. Run again, it
# renews the certificates, and services read them while they run. DAYS says how long a certificate is valid (90).
#
# A node needs ca.pem and its own two files. ca.key stays where this runs.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
folder=$1
shift
umask 077
mkdir -p "$folder"
work=$(mktemp -d "$folder/.new-XXXXXX")
trap 'rm -rf "$work"' EXIT
curve=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)

if [[ ! -e $folder/ca.key ]]; then
    openssl req -x509 "${curve[@]}" -days 3650 -subj "/CN=weighbridge authority" \
        -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout "$work/ca.key" -out "$work/ca.pem" 2> "$work/log" ||
        { cat "$work/log" >&2; exit 1; }
    mv "$work/ca.pem" "$folder/ca.pem"
    mv "$work/ca.key" "$folder/ca.key"
fi

for names in "$@"; do
    IFS=, read -ra each <<< "$names"
    file=${each[0]:-}
    file=${file#\*.}
    alternatives=
    for name in "${each[@]:-}"; do
        if [[ $name =~ ^[0-9.]+$ || $name == *:* ]]; then
            kind=IP
        elif [[ $name =~ ^(\*\.)?[A-Za-z0-9._-]+$ ]]; then
            kind=DNS
        else
            echo "no name or address of a node: '$name'" >&2
            exit 2
        fi
        alternatives+=${alternatives:+,}$kind:$name
    done
    cat > "$work/extensions" << END
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = $alternatives
END
    {
        openssl req -new "${curve[@]}" -subj "/CN=weighbridge" -keyout "$work/key" -out "$work/request" &&
            openssl x509 -req -in "$work/request" -CA "$folder/ca.pem" -CAkey "$folder/ca.key" \
                -set_serial "0x$(openssl rand -hex 16)" -days "${DAYS:-90}" -extfile "$work/extensions" -out "$work/certificate"
    } 2> "$work/log" || { cat "$work/log" >&2; exit 1; }
    mv "$work/key" "$folder/$file.key"
    mv "$work/certificate" "$folder/$file.pem"
    echo "$folder/$file.pem: $alternatives"
done
