"""The style sheet of every page."""

# Series: Okabe and Ito's colours, told apart with any kind of colour vision; lighter ones on dark ground. Signed quantities
# go from vermilion over nothing to blue, others from nothing to green: laid over the ground, so that text stays readable.
STYLE = """
:root{
  color-scheme:light dark;--ground:#fff;--panel:#f7f7f5;--ink:#1c1c1a;--soft:#66655f;--rule:#deddd6;--c0:#0072b2;
  --c1:#d55e00;--c2:#009e73;--c3:#b5468b;--c4:#b88400;--c5:#3d9fd0;--c6:#5b5b57;--c7:#7a5ca8;--pos:0 114 178;
  --neg:213 94 0;--seq:0 140 100}
@media(prefers-color-scheme:dark){
  :root{
    --ground:#161615;--panel:#1f1f1d;--ink:#e8e7e1;--soft:#a3a29a;--rule:#393834;--c0:#58b1e6;--c1:#ff9350;--c2:#3fc99b;
    --c3:#e492c4;--c4:#e8b647;--c5:#93d2f5;--c6:#b9b8b1;--c7:#b69ae0;--pos:70 160 225;--neg:240 125 50;--seq:45 180 135}
}
*{box-sizing:border-box}
body{
  margin:0 auto;padding:2.2rem 1.2rem 4rem;max-width:1240px;background:var(--ground);color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.55rem;font-weight:650;margin:0 0 .2rem;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1.08rem;font-weight:650;margin:2.6rem 0 .8rem;padding-top:.7rem;border-top:1px solid var(--rule)}
p{margin:.3rem 0;max-width:75ch}
.lead,.note,figcaption+p{color:var(--soft)}
.note{font-size:.82rem}
nav{margin:.8rem 0 0;font-size:.88rem}
nav a{margin-right:1.1rem;white-space:nowrap}
a{color:var(--c0)}
.facts{display:flex;flex-wrap:wrap;gap:.35rem 1.6rem;margin:.7rem 0 0;font-size:.9rem}
.facts div{overflow-wrap:anywhere}
.facts dt{display:inline;color:var(--soft);margin-right:.4rem}
.facts dd{display:inline;margin:0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:1.4rem 1.6rem}
figure{margin:0;min-width:0}
figcaption{font-weight:600;font-size:.92rem;margin-bottom:.15rem}
svg{display:block;width:100%;height:auto;overflow:visible}
svg.wide{min-width:520px}
svg text{
  fill:var(--soft);font:11px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;
  font-variant-numeric:tabular-nums}
svg .name,svg .label{fill:var(--ink)}
svg .name{font-size:12px}
.grid{stroke:var(--rule);stroke-width:1;fill:none}
.zero{stroke:var(--soft);stroke-width:1;fill:none;stroke-dasharray:3 3}
.shade{fill:var(--ink);opacity:.05}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}
.band{stroke:none}
.point{stroke:var(--ground);stroke-width:1}
.touch{opacity:0}
.touch:hover{opacity:.6}
.whisker{stroke:var(--ink);stroke-width:1.6}
.clear{fill:var(--c0)}
.unclear{fill:var(--ground);stroke:var(--c0);stroke-width:2}
.c0{--c:var(--c0)}
.c1{--c:var(--c1)}
.c2{--c:var(--c2)}
.c3{--c:var(--c3)}
.c4{--c:var(--c4)}
.c5{--c:var(--c5)}
.c6{--c:var(--c6)}
.c7{--c:var(--c7)}
.line{stroke:var(--c)}
.band,.point,.touch,.bar{fill:var(--c)}
.legend{display:flex;flex-wrap:wrap;gap:.1rem .9rem;font-size:.8rem;color:var(--soft);margin-bottom:.2rem}
.swatch{
  display:inline-block;width:.85rem;height:.28rem;border-radius:2px;background:var(--c);margin-right:.35rem;
  vertical-align:middle}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:.28rem .8rem .28rem 0;border-bottom:1px solid var(--rule);text-align:left;vertical-align:top}
th{font-weight:600}
td.n,th.n{text-align:right;white-space:nowrap;padding:.28rem 0 .28rem 1.3rem}
.n+td:not(.n),.n+th:not(.n){padding-left:1.6rem}
thead th{color:var(--soft);font-weight:500;white-space:nowrap}
td.text{
  font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.82rem;white-space:pre-wrap;
  overflow-wrap:anywhere;min-width:12ch}
table.heatmap{margin-bottom:1rem}
table.heatmap td,table.heatmap th{padding:.45rem .7rem;text-align:center;border:2px solid var(--ground)}
table.heatmap th[scope=row]{text-align:right}
td.heat{background:color-mix(in srgb,rgb(var(--seq)/.62) var(--heat,0%),var(--panel))}
details{margin-top:.6rem}
summary{cursor:pointer;font-weight:600;font-size:.95rem}
pre{
  background:var(--panel);padding:.9rem 1rem;border-radius:6px;overflow-x:auto;
  font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.choice{position:absolute;opacity:0}
.choice+label{
  display:inline-block;padding:.22rem .75rem;margin:0 .3rem .5rem 0;border:1px solid var(--rule);border-radius:99px;
  font-size:.86rem;cursor:pointer}
.choice:checked+label{background:var(--ink);color:var(--ground);border-color:var(--ink)}
.choice:focus-visible+label{outline:2px solid var(--c0);outline-offset:2px}
.response{margin:0 0 1.1rem;padding:.7rem .9rem .8rem;background:var(--panel);border-radius:8px}
.response h3{font-size:.86rem;font-weight:500;color:var(--soft);margin:0 0 .4rem}
.response h3 b{color:var(--ink);font-weight:600}
.panes{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr));gap:.6rem 1.4rem}
.pane h4{font-size:.8rem;font-weight:600;margin:0 0 .15rem;overflow-wrap:anywhere}
.text-of{
  font:13.5px/1.9 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere;
  margin:0}
.t{padding:.16em .05em;border-radius:2px}
.t.m{opacity:.45;text-decoration:underline dotted}
.prompt{color:var(--soft)}
.turn{
  overflow:hidden;margin:.3rem 0;padding:.2rem .6rem;background:var(--ground);border:1px solid var(--rule);
  border-left:3px solid var(--ink);border-radius:4px}
.beside{
  float:right;display:flex;flex-wrap:wrap;justify-content:flex-end;gap:0 .7rem;max-width:70%;margin-left:1rem;
  font:.78rem/1.9rem system-ui,sans-serif;color:var(--soft)}
.beside b{color:var(--ink);font-weight:600}
.beside .mean{display:none;color:var(--ink);border-radius:2px;padding:0 .3em;line-height:1.5;align-self:center}
td .turn{min-width:min(24rem,60vw)}
.observed{margin:.3rem 0 .3rem 1.6rem;padding:.1rem .6rem;color:var(--soft);border-left:3px solid var(--rule)}
.observed b{font:.75rem/1.5 system-ui,sans-serif;margin-right:.8em}
.observed b.again{display:block}
.scale{display:none;font-size:.78rem;color:var(--soft);align-items:center;gap:.45rem;margin-bottom:.2rem}
.scale i{display:inline-block;width:5.5rem;height:.6rem;border-radius:2px;border:1px solid var(--rule)}
.diverging{background:linear-gradient(90deg,rgb(var(--neg)/.8),transparent,rgb(var(--pos)/.8))}
.sequential{background:linear-gradient(90deg,transparent,rgb(var(--seq)/.75))}
@media print{
  details{display:block}
  body{max-width:none}
}
"""
