(() => {
  "use strict";
  const root = document.documentElement;
  root.classList.add("js");
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  // Hover card.
  const tip = document.getElementById("tip");
  let over = null;
  const place = (x, y) => {
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), innerWidth - box.width - 8);
    const top = y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18;
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(8, top)}px`;
  };
  document.addEventListener("pointermove", (event) => {
    const found = event.target.closest("[data-tip]");
    if (found !== over) {
      over = found;
      tip.hidden = !found;
      if (found) {
        const [head, ...rest] = found.dataset.tip.split("\n");
        const strong = document.createElement("b");
        strong.textContent = head;
        tip.replaceChildren(rest.length ? strong : document.createTextNode(head));
        for (const line of rest) {
          const p = document.createElement("p");
          p.textContent = line;
          tip.append(p);
        }
      }
    }
    if (found) place(event.clientX, event.clientY);
  });
  document.addEventListener("scroll", () => { tip.hidden = true; over = null; }, { passive: true });

  // The table: filter, sort, unfold.
  const table = document.getElementById("table");
  const sites = all("tbody.site");
  const find = document.getElementById("find");
  const shown = document.getElementById("shown");
  const more = document.getElementById("all");
  const sorter = document.getElementById("sorter");
  const FEW = 30;
  let every = sites.length <= FEW + 10;
  const off = new Set();

  const fold = document.getElementById("fold");

  const refresh = () => {
    if (!table) return;
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const families = new Map();
    let matching = 0;
    let rows = 0;
    for (const site of all("tbody.site", table)) {
      const name = site.dataset.name.toLowerCase();
      const fits = words.every((word) => name.includes(word)) && site.dataset.statuses.split(" ").some((s) => !off.has(s));
      site.hidden = true;
      if (!fits) continue;
      matching += 1;
      const first = fold.checked && families.get(site.dataset.family);
      if (first) {
        first.alike += 1;
      } else {
        families.set(site.dataset.family, { site, alike: 0 });
        rows += 1;
        site.hidden = !every && rows > FEW;
        site.querySelector(".alike").textContent = "";
      }
    }
    if (fold.checked) {
      for (const { site, alike } of families.values()) {
        site.querySelector(".alike").textContent = alike ? `and ${alike} alike` : "";
      }
    }
    shown.textContent = !matching ? "no site matches" : matching === sites.length ? `${matching} sites` : `${matching} of ${sites.length} sites`;
    more.hidden = every || rows <= FEW;
    more.textContent = `Show ${rows - FEW} more`;
  };
  const unfold = (site, open) => {
    site.classList.toggle("open", open);
    site.querySelector("button.open").setAttribute("aria-expanded", String(open));
  };
  const sort = (key, descending) => {
    const numeric = key !== "name";
    const value = (site) => (numeric ? Number(site.dataset[key]) : site.dataset[key]);
    const sign = descending ? -1 : 1;
    const collator = new Intl.Collator("en", { numeric: true });
    const order = [...sites].sort((a, b) => sign * (numeric ? value(a) - value(b) : collator.compare(value(a), value(b))));
    table.append(...order);
    for (const head of all("th[data-sort]", table)) {
      head.setAttribute("aria-sort", head.dataset.sort !== key ? "none" : descending ? "descending" : "ascending");
    }
    sorter.value = key;
    refresh();
  };
  if (table) {
    find.addEventListener("input", refresh);
    fold.addEventListener("change", refresh);
    more.addEventListener("click", () => { every = true; refresh(); });
    sorter.addEventListener("change", () => sort(sorter.value, sorter.value !== "name"));
    for (const head of all("th[data-sort]", table)) {
      head.querySelector("button").addEventListener("click", () => {
        const now = head.getAttribute("aria-sort");
        sort(head.dataset.sort, now === "none" ? head.dataset.sort !== "name" : now === "ascending");
      });
    }
    for (const site of sites) {
      site.querySelector("tr.main").addEventListener("click", () => {
        if (String(getSelection())) return;
        unfold(site, !site.classList.contains("open"));
      });
    }
  }

  // Status switches: one state for plot and table.
  for (const button of all("button.toggle")) {
    button.addEventListener("click", () => {
      const status = button.dataset.status;
      off.has(status) ? off.delete(status) : off.add(status);
      for (const twin of all(`button.toggle[data-status="${status}"]`)) twin.setAttribute("aria-pressed", String(!off.has(status)));
      for (const point of all(`.point[data-status="${status}"]`)) point.classList.toggle("off", off.has(status));
      refresh();
    });
  }
  for (const point of all(".point")) {
    point.addEventListener("click", () => {
      const site = document.getElementById(`s${point.dataset.site}`);
      find.value = site.dataset.name;
      refresh();
      unfold(site, true);
      site.scrollIntoView({ block: "center" });
    });
  }
  for (const button of all("button.copy")) {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(code);
      }
    });
  }
  refresh();
})();
