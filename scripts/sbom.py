#!/usr/bin/env python3
"""sbom.py VERSION FILE...: the bill of materials (SPDX 2.3) of a release's files: what their binaries were made of."""
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

# Debian's package, license, how its code comes into the binaries.
DEBIAN = {
    "eigen": ("libeigen3-dev", "MPL-2.0", "STATIC_LINK"),
    "xsimd": ("libxsimd-dev", "BSD-3-Clause", "STATIC_LINK"),
    "nlohmann-json": ("nlohmann-json3-dev", "MIT", "STATIC_LINK"),
    "CLI11": ("libcli11-dev", "BSD-3-Clause", "STATIC_LINK"),
    "libgomp": ("libgomp1", "GPL-3.0-or-later WITH GCC-exception-3.1", "CONTAINS"),
}
PYPI = {"nanobind": ("nanobind", "BSD-3-Clause AND MIT", "STATIC_LINK")}  # with tsl::robin_map


def debian_version(package):
    out = subprocess.run(["dpkg-query", "--show", "--showformat=${Version}", package], capture_output=True, text=True)
    return out.stdout if out.returncode == 0 else "NOASSERTION"


def package(name, version, license, purl=None):
    p = {"SPDXID": f"SPDXRef-{name}", "name": name, "downloadLocation": "NOASSERTION", "filesAnalyzed": False,
         "versionInfo": version, "licenseConcluded": license, "licenseDeclared": license, "copyrightText": "NOASSERTION"}
    if purl:
        p["externalRefs"] = [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}]
    return p


def main(version, *files):
    packages = [package("softdelta", version, "MIT", f"pkg:pypi/softdelta@{version}")]
    relationships = [("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-softdelta")]
    for table, find, kind in ((DEBIAN, debian_version, "deb/debian"), (PYPI, importlib.metadata.version, "pypi")):
        for name, (source, license, relation) in table.items():
            found = find(source)
            packages.append(package(name, found, license, f"pkg:{kind}/{source}@{found}"))
            relationships.append(("SPDXRef-softdelta", relation, f"SPDXRef-{name}"))
    packages.append(package("dlpack", "0.6", "Apache-2.0", "pkg:github/dmlc/dlpack@v0.6"))  # a copy of its header
    relationships.append(("SPDXRef-softdelta", "CONTAINS", "SPDXRef-dlpack"))
    contents = [(f"SPDXRef-file-{i}", pathlib.Path(f)) for i, f in enumerate(files)]
    all_bytes = hashlib.sha256(b"".join(f.read_bytes() for _, f in contents)).hexdigest()
    made = datetime.datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", 0)), datetime.timezone.utc)
    json.dump({
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT", "name": f"softdelta-{version}",
        "documentNamespace": f"https://spdx.org/spdxdocs/softdelta-{version}-{all_bytes[:32]}",
        "creationInfo": {"created": made.strftime("%Y-%m-%dT%H:%M:%SZ"), "creators": ["Tool: scripts/sbom.py"]},
        "packages": packages,
        "files": [{"SPDXID": id, "fileName": f"./{f.name}", "copyrightText": "NOASSERTION",
                   "licenseConcluded": "NOASSERTION", "licenseInfoInFiles": ["NOASSERTION"],
                   "checksums": [{"algorithm": a, "checksumValue": hashlib.new(a, f.read_bytes()).hexdigest()}
                                 for a in ("SHA1", "SHA256")]} for id, f in contents],
        "relationships": [{"spdxElementId": a, "relationshipType": r, "relatedSpdxElement": b}
                          for a, r, b in relationships + [(id, "GENERATED_FROM", "SPDXRef-softdelta") for id, _ in contents]],
    }, sys.stdout, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
