#!/usr/bin/env python3
"""Opens each page of the site in headless Chromium: are links whole, formulas drawn, pictures there, does the search find?

    docs/site/look.py [--pictures] SITE      # with pictures of some pages beside SITE
"""
import argparse
import functools
import http.server
import re
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag

from playwright.sync_api import sync_playwright

parser = argparse.ArgumentParser()
parser.add_argument("--pictures", action="store_true")
parser.add_argument("site", type=Path)
arguments = parser.parse_args()
site = arguments.site.resolve()

SEEN = """() => ({
    links: [...document.querySelectorAll("a[href]")].map(a => a.href),
    names: [...document.querySelectorAll("[id]")].map(e => e.id),
    formulas: document.querySelectorAll(".math").length,
    drawn: document.querySelectorAll(".math .katex").length,
    failed: [...document.querySelectorAll(".katex-error")].map(e => e.title),
    empty: [...document.images].filter(i => i.loading != "lazy" && !i.naturalWidth).map(i => i.src),
})"""



class Server(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=site))
threading.Thread(target=server.serve_forever, daemon=True).start()
here = f"http://127.0.0.1:{server.server_port}/"
faults, pages, formulas = [], {}, 0
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: faults.append(f"{page.url}: {error}"))
    # The search fetches the pages that it lists, for their first lines; the next page ends that.
    page.on("requestfailed", lambda request: request.resource_type == "fetch" or
            faults.append(f"{page.url}: {request.url} {request.failure}"))
    for file in sorted(site.rglob("*.html")):
        url = here + str(file.relative_to(site))
        page.goto(url)
        seen = pages[url] = page.evaluate(SEEN)
        formulas += seen["formulas"]
        faults += [f"{url}: {text}" for text in seen["failed"]]
        faults += [f"{url}: picture {text} is empty" for text in seen["empty"]]
        if seen["drawn"] < seen["formulas"]:
            faults.append(f"{url}: {seen['drawn']} of {seen['formulas']} formulas are drawn")
    faults += [f"asks another server: {url}" for url in set(asked) if not url.startswith((here, "data:"))]

    for words in ("block table", "softdelta_attention_forward", "chunk_kda", "amxbf16"):
        page.goto(here + "search.html?q=" + words)
        try:
            page.wait_for_selector("ul.search li a", timeout=20000)
        except Exception:
            faults.append(f"the search does not find {words}")

    if arguments.pictures:
        for name in ("index.html", "docs/math.html#fold", "docs/performance.html#attention-beside-sdpa", "docs/site/c.html"):
            page.goto(here + name)
            page.screenshot(path=site.parent / (re.sub(r"\W+", "-", name) + ".png"))
    browser.close()

links = 0
for url, seen in pages.items():
    for link in {link for link in seen["links"] if link.startswith(here)}:
        links += 1
        target, place = urldefrag(link)
        if not (site / unquote(target.removeprefix(here))).is_file():
            faults.append(f"{url}: {link} does not exist")
        elif place and target in pages and unquote(place) not in pages[target]["names"]:
            faults.append(f"{url}: {link}: no such place")
print("\n".join(faults))
print(f"{len(pages)} pages, {links} links, {formulas} formulas, {len(faults)} faults")
sys.exit(bool(faults) or not formulas)
