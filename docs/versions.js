// Shows a list of the site's versions in the head of each page. The list is ../versions.js: a script and no JSON,
// because a browser does not fetch JSON from file://. A site built without versions has no list, and shows none.
(() => {
  const own = new URL(".", document.currentScript.src), all = new URL("../", own);
  const list = document.createElement("script");
  list.src = new URL("versions.js", all);
  list.onload = () => {
    const select = document.createElement("select");
    select.className = "version";
    select.setAttribute("aria-label", "Version");
    for (const name of window.MESHMARK_VERSIONS) {
      const here = new URL(`${name}/`, all).href === own.href;
      select.add(new Option(name, name, here, here));
    }
    select.onchange = () => { location.href = new URL(`${select.value}/index.html`, all); };
    document.querySelector(".md-header__title").after(select);
  };
  document.head.append(list);
})();
